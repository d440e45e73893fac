#include "core/xtensor.h"

#include <exception>
#include <sstream>
#include <xtensor/xnpy.hpp>

#include "core/internal/atomic_file.h"
#include "core/internal/mapped_file.h"

namespace shardbook {
namespace {

template <typename T>
std::string npy_bytes(const Tensor& tensor) {
  const std::vector<std::size_t> shape(tensor.shape().begin(),
                                       tensor.shape().end());
  return xt::dump_npy(xt::adapt(tensor.to_vector<T>(), shape));
}

/// The values of a file's bytes, which xtensor takes to be what their header
/// says: it checks neither that they are all there nor that sizes fit in 64 bits.
template <typename T>
Tensor read_values(const std::string& bytes, const Device& device) {
  std::istringstream stream(bytes);
  const auto values = xt::load_npy<T>(stream);
  double size = sizeof(T);
  for (const std::size_t each : values.shape()) {
    size *= static_cast<double>(each);
  }
  SB_CHECK(stream && size <= static_cast<double>(bytes.size()),
           "its values end early");
  return from_xtensor(values, device);
}

/// The text between NumPy's ten first bytes and the values, which names type
/// and shape. xtensor expects it well-formed, as NumPy writes it.
std::string header_of(const std::string& bytes) {
  const auto byte = [&](std::size_t i) {
    return static_cast<std::size_t>(static_cast<unsigned char>(bytes[i]));
  };
  const bool is_npy = bytes.size() > 10 &&
                      bytes.compare(0, 8, "\x93NUMPY\1\0", 8) == 0 &&
                      10 + byte(8) + 256 * byte(9) <= bytes.size();
  return is_npy ? bytes.substr(10, byte(8) + 256 * byte(9)) : "";
}

Tensor read_any(const std::string& bytes, const Device& device) {
  const std::string header = header_of(bytes), key = "'descr': '";
  const std::size_t at = header.find(key);
  SB_CHECK(
      at != std::string::npos && header.find("'shape': (") != std::string::npos,
      "it is not a .npy file of NumPy's");
  const std::size_t begin = at + key.size();
  const std::string type =
      header.substr(begin, header.find('\'', begin) - begin);
  if (type == "<f8") return read_values<double>(bytes, device);
  if (type == "<f4") return read_values<float>(bytes, device);
  if (type == "<i8") return read_values<std::int64_t>(bytes, device);
  if (type == "<i4") return read_values<std::int32_t>(bytes, device);
  if (type == "<i2") return read_values<std::int16_t>(bytes, device);
  if (type == "|i1") return read_values<std::int8_t>(bytes, device);
  if (type == "<u4") return read_values<std::uint32_t>(bytes, device);
  if (type == "<u2") return read_values<std::uint16_t>(bytes, device);
  if (type == "|u1") return read_values<std::uint8_t>(bytes, device);
  if (type == "|b1") return read_values<bool>(bytes, device);
  SB_FAIL("its type is ", type,
          "; give float64, float32, bool or a little-endian integer");
}

}  // namespace

void save_npy(const std::string& path, const Tensor& tensor) {
  const DType dtype = tensor.dtype();
  const std::string bytes =
      dtype == DType::kF64   ? npy_bytes<double>(tensor)
      : dtype == DType::kI64 ? npy_bytes<std::int64_t>(tensor)
      : dtype == DType::kI32 ? npy_bytes<std::int32_t>(tensor)
                             : npy_bytes<float>(tensor);
  internal::AtomicFile file(path);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

Tensor load_npy(const std::string& path, const Device& device) {
  const internal::MappedFile file(path);
  const std::string bytes(static_cast<const char*>(file.bytes()), file.size());
  try {
    return read_any(bytes, device);
  } catch (const std::exception& error) {
    throw Error(path + ": " + error.what());
  }
}

}  // namespace shardbook

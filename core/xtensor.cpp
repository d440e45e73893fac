#include "core/xtensor.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <regex>
#include <sstream>
#include <xtensor/xnpy.hpp>

#include "core/internal/files.h"

namespace shardbook {
namespace {

// 64 dims need fewer bytes
constexpr std::size_t kMaxHeader = 4096;

template <typename T>
std::string npy_bytes(const Tensor& tensor) {
  const std::vector<std::size_t> shape(tensor.shape().begin(),
                                       tensor.shape().end());
  return xt::dump_npy(xt::adapt(tensor.to_vector<T>(), shape));
}

/// The header of a file, as NumPy writes it. xtensor accepts more, but does not
/// check sizes: values may be missing, or their number may not fit in 64 bits.
struct NpyHeader {
  std::string type;   ///< "<f4"
  double values = 1;  ///< elements
  std::size_t bytes = 0;
};

NpyHeader read_header(const std::string& bytes) {
  const auto byte = [&](std::size_t i) {
    return static_cast<std::size_t>(static_cast<unsigned char>(bytes[i]));
  };
  const bool is_npy =
      bytes.size() > 10 && bytes.compare(0, 8, "\x93NUMPY\1\0", 8) == 0;
  const std::size_t length = is_npy ? byte(8) + 256 * byte(9) : 0;
  const std::string text =
      is_npy ? bytes.substr(10, std::min(length, kMaxHeader)) : "";
  static const std::regex kText(
      R"(\{'descr': '([<>|=]\w\d+)', 'fortran_order': (?:True|False), )"
      R"('shape': \(((?:\d+, )*(?:\d+,?)?)\), \} *\n)");
  std::smatch found;
  SB_CHECK(text.size() == length && std::regex_match(text, found, kText),
           "it is not a .npy file of NumPy's");
  NpyHeader header;
  header.bytes = 10 + length;
  header.type = found[1];
  std::istringstream sizes(found[2]);
  for (std::string size; std::getline(sizes, size, ',');) {
    header.values *= std::strtod(size.c_str(), nullptr);
  }
  return header;
}

template <typename T>
Tensor read_values(const NpyHeader& header, const std::string& bytes,
                   const Device& device) {
  SB_CHECK(header.values * sizeof(T) <=
               static_cast<double>(bytes.size() - header.bytes),
           "its values end early");
  std::istringstream stream(bytes);
  return from_xtensor(xt::load_npy<T>(stream), device);
}

Tensor read_any(const std::string& bytes, const Device& device) {
  const NpyHeader header = read_header(bytes);
  const std::string& type = header.type;
  if (type == "<f8") return read_values<double>(header, bytes, device);
  if (type == "<f4") return read_values<float>(header, bytes, device);
  if (type == "<i8") return read_values<std::int64_t>(header, bytes, device);
  if (type == "<i4") return read_values<std::int32_t>(header, bytes, device);
  if (type == "<i2") return read_values<std::int16_t>(header, bytes, device);
  if (type == "|i1") return read_values<std::int8_t>(header, bytes, device);
  if (type == "<u4") return read_values<std::uint32_t>(header, bytes, device);
  if (type == "<u2") return read_values<std::uint16_t>(header, bytes, device);
  if (type == "|u1") return read_values<std::uint8_t>(header, bytes, device);
  if (type == "|b1") return read_values<bool>(header, bytes, device);
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

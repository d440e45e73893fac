#include "core/xtensor.h"

#include <algorithm>
#include <exception>
#include <string_view>
#include <xtensor/xnpy.hpp>

#include "core/internal/files.h"
#include "core/npy.h"

namespace shardbook {
namespace {

template <typename T>
std::string npy_bytes(const Tensor& tensor) {
  const std::vector<std::size_t> shape(tensor.shape().begin(),
                                       tensor.shape().end());
  return xt::dump_npy(xt::adapt(tensor.to_vector<T>(), shape));
}

template <typename T>
Tensor read_values(const NpyHeader& header, std::string_view bytes,
                   const Device& device) {
  std::vector<T> values(static_cast<std::size_t>(header.num_values));
  std::copy_n(bytes.data() + header.offset, values.size() * sizeof(T),
              reinterpret_cast<char*>(values.data()));
  const std::vector<std::size_t> shape(header.shape.begin(),
                                       header.shape.end());
  if (header.is_fortran) {
    return from_xtensor(xt::adapt<xt::layout_type::column_major>(values, shape),
                        device);
  }
  return from_xtensor(xt::adapt(values, shape), device);
}

Tensor read_any(std::string_view bytes, const Device& device) {
  const NpyHeader header = read_npy_header(bytes, bytes.size());
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
  if (type == "|b1") return read_values<std::uint8_t>(header, bytes, device);
  SB_FAIL("its type is ", type,
          "; give float64, float32, bool, or a little-endian integer other "
          "than uint64");
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
  try {
    return read_any({static_cast<const char*>(file.bytes()), file.size()},
                    device);
  } catch (const std::exception& error) {
    throw Error(path + ": " + error.what());
  }
}

}  // namespace shardbook

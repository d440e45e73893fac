#include "core/internal/transfers.h"

#include <cstddef>
#include <cstring>
#include <vector>

#include "core/context.h"
#include "core/internal/cuda_device.h"
#include "core/internal/device_runtime.h"
#include "core/kernels/elementwise.h"

namespace shardbook::internal {
namespace {

std::size_t size_of(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.bytes());
}

// The stream of this thread on a tensor's GPU, for the runtime's calls.
struct OnStream {
  explicit OnStream(const Tensor& tensor)
      : number(RankContext::current().stream),
        gpu(cuda_device(tensor.device())),
        runtime(gpu.runtime()),
        stream(gpu.stream(number)) {}
  int number;
  CudaDevice& gpu;
  DeviceRuntime& runtime;
  void* stream;
};

void cast(const Tensor& to, const Tensor& from, const Device& where) {
  kernels::cast(RankContext::current().kernels(where), from.dtype(), from.raw(),
                to.dtype(), to.raw(), to.numel());
}

// Bytes from one GPU, or rank's part of one, to another. Both streams meet
// before and after, so neither side needs to know of the other's streams.
void copy_between_gpus(const Tensor& to, const Tensor& from) {
  if (to.dtype() != from.dtype()) {
    const MemoryScope kind(MemoryKind::kWorkspace);
    const Tensor same = Tensor::empty(to.shape(), {to.dtype(), from.device()});
    cast(same, from, from.device());
    return copy_between_gpus(to, same);
  }
  const void* source = from.raw();
  void* target = to.raw();
  const OnStream on_source(from);
  const OnStream on(to);
  on.gpu.hold(on.number, on_source.gpu, on.number);
  on.runtime.copy(target, source, size_of(to), on.stream);
  on_source.gpu.hold(on.number, on.gpu, on.number);
}

}  // namespace

void zero_bytes(const Tensor& tensor) {
  void* data = tensor.raw();
  if (!tensor.device().is_cuda()) {
    std::memset(data, 0, size_of(tensor));
    return;
  }
  const OnStream on(tensor);
  on.runtime.fill_zero(data, size_of(tensor), on.stream);
}

void write_from_host(const Tensor& to, const void* from) {
  void* data = to.raw();
  if (!to.device().is_cuda()) {
    std::memcpy(data, from, size_of(to));
    return;
  }
  const OnStream on(to);
  on.gpu.refuse_recording("values are written from the host");
  on.runtime.copy(data, from, size_of(to), on.stream);
  on.runtime.synchronize_stream(on.stream);
}

void read_to_host(void* to, const Tensor& from) {
  const void* data = from.raw();
  if (!from.device().is_cuda()) {
    std::memcpy(to, data, size_of(from));
    return;
  }
  const OnStream on(from);
  on.gpu.refuse_recording("the host reads values");
  on.runtime.copy(to, data, size_of(from), on.stream);
  on.runtime.synchronize_stream(on.stream);
  on.runtime.check_kernels(RankContext::current().kernels(from.device()));
}

void copy_elements(const Tensor& to, const Tensor& from) {
  const bool to_gpu = to.device().is_cuda();
  const bool from_gpu = from.device().is_cuda();
  if (to.numel() == 0) return;
  if (to_gpu && from_gpu && to.device() != from.device()) {
    return copy_between_gpus(to, from);
  }
  if (to_gpu == from_gpu) return cast(to, from, to.device());

  // Between the host and a GPU
  RankContext& context = RankContext::current();
  const Tensor& on_gpu = to_gpu ? to : from;
  std::vector<std::byte> staged;
  if (to.dtype() != from.dtype()) staged.resize(size_of(on_gpu));
  if (to_gpu) {
    if (staged.empty()) return write_from_host(to, from.raw());
    kernels::cast(context.kernels(from.device()), from.dtype(), from.raw(),
                  to.dtype(), staged.data(), to.numel());
    write_from_host(to, staged.data());
  } else {
    if (staged.empty()) return read_to_host(to.raw(), from);
    read_to_host(staged.data(), from);
    kernels::cast(context.kernels(to.device()), from.dtype(), staged.data(),
                  to.dtype(), to.raw(), to.numel());
  }
}

Tensor on_host(const Tensor& tensor) {
  if (!tensor.device().is_cuda()) return tensor;
  // Before host memory is allocated
  cuda_device(tensor.device()).refuse_recording("the host reads values");
  const MemoryScope kind(MemoryKind::kWorkspace);
  const Tensor copy = Tensor::empty(
      tensor.shape(), {tensor.dtype(), RankContext::current().host()});
  copy_elements(copy, tensor);
  return copy;
}

}  // namespace shardbook::internal

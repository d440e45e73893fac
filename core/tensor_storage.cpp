#include "core/tensor_storage.h"

#include "core/check.h"
#include "core/internal/tensor_impl.h"

namespace shardbook {

void set_data(const Tensor& tensor, const Tensor& source) {
  SB_CHECK(source.numel() == tensor.numel() && source.dtype() == tensor.dtype(),
           "set_data: ", dtype_name(source.dtype()), shape_text(source.shape()),
           " cannot stand for ", dtype_name(tensor.dtype()),
           shape_text(tensor.shape()));
  tensor.impl()->storage = source.impl()->storage;
  tensor.impl()->offset = source.impl()->offset;
}

void release_storage(const Tensor& tensor) {
  tensor.impl()->storage->resize(0);
}

void restore_storage(const Tensor& tensor) {
  SB_CHECK(tensor.impl()->offset == 0,
           "restore_storage: call it on the tensor that covers the storage");
  tensor.impl()->storage->resize(tensor.bytes());
}

void set_grad_buffer(const Tensor& tensor, const Tensor& buffer) {
  SB_CHECK(!buffer.defined() || buffer.shape() == tensor.shape(),
           "set_grad_buffer: shape ", shape_text(buffer.shape()),
           " for a tensor of shape ", shape_text(tensor.shape()));
  tensor.impl()->grad_meta().grad_buffer = buffer;
}

MemoryKind memory_kind_of(const Tensor& tensor) {
  return tensor.impl()->storage->kind();
}

const Tensor& set_memory_kind(const Tensor& tensor, MemoryKind kind) {
  tensor.impl()->storage->set_kind(kind);
  return tensor;
}

void set_stands_for_parameter(const Tensor& tensor) {
  SB_CHECK(tensor.defined(),
           "set_stands_for_parameter: the tensor is undefined");
  tensor.impl()->grad_meta().stands_for_parameter = true;
}

bool stands_for_parameter(const Tensor& tensor) {
  return tensor.defined() && tensor.impl()->meta != nullptr &&
         tensor.impl()->meta->stands_for_parameter;
}

}  // namespace shardbook

#pragma once

// Weights of the Llama family, for tests of their files.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/internal/llama_files.h"
#include "chapters/common/models/models.h"
#include "core/check.h"
#include "core/safetensors.h"
#include "tests/chapters/common/common_support.h"
#include "tests/chapters/common/llama_support.h"

namespace shardbook::common_test {

/// Weights without layers: zeros, under the names of a model in memory.
class Weights : public ModuleOf<Weights> {
 public:
  explicit Weights(const ModelConfig& config, DType dtype = DType::kF32,
                   const PartOf& part_of = {}) {
    for (const TensorInFiles& weight : llama_weights(config)) {
      const PartOfFile part = part_of ? part_of(weight.name) : PartOfFile{};
      Shape whole = weight.shape;
      if (part.rows > 0) whole[0] = part.rows;
      tensors_.push_back(
          {weight.name,
           Tensor::zeros(shape_of(part.shards, whole), {dtype, Device()})});
    }
  }
  Tensor forward(const Tensor& x) override { return x; }
  void members(MemberVisitor& visit) override {
    for (NamedTensor& each : tensors_) visit.parameter(each.name, each.tensor);
  }
  std::string type_name() const override { return "Weights"; }

  Tensor& at(const std::string& name) {
    const auto found = std::find_if(
        tensors_.begin(), tensors_.end(),
        [&](const NamedTensor& each) { return each.name == name; });
    SB_CHECK(found != tensors_.end(), "no ", name);
    return found->tensor;
  }
  void remove(const std::string& name) {
    tensors_.erase(
        std::remove_if(tensors_.begin(), tensors_.end(),
                       [&](const NamedTensor& e) { return e.name == name; }),
        tensors_.end());
  }
  const std::vector<NamedTensor>& tensors() const { return tensors_; }

 private:
  std::vector<NamedTensor> tensors_;
};

inline std::string golden_weights(const std::string& name) {
  return (kGolden / name / "model.safetensors").string();
}

/// A tensor of a file.
inline Tensor tensor_in(const CheckpointReader& file, const std::string& name) {
  const SafetensorsEntry& entry = file.find(name);
  const Tensor tensor = Tensor::zeros(entry.shape, {entry.dtype, Device()});
  std::memcpy(tensor.raw(), file.data(name),
              static_cast<std::size_t>(entry.end - entry.begin));
  return tensor;
}

inline std::vector<NamedTensor> tensors_in(const std::string& path) {
  const CheckpointReader file = CheckpointReader::open(path);
  std::vector<NamedTensor> tensors;
  for (const std::string& name : file.names()) {
    tensors.push_back({name, tensor_in(file, name)});
  }
  return tensors;
}

class LlamaFiles : public CommonFiles {
 protected:
  /// Writes the tensors of a golden file after a change.
  template <typename Change>
  std::string changed(const std::string& name, const Change& change) const {
    std::vector<NamedTensor> tensors = tensors_in(golden_weights(name));
    change(tensors);
    save_tensors(path("changed.safetensors"), tensors);
    return path("changed.safetensors");
  }
};

}  // namespace shardbook::common_test

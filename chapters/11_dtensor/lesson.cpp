// DTensor on one screen: a tensor that knows how it lies over the ranks. Column
// and row parallelism are two choices of placements, and the messages follow.
//
//   ./shardbook lesson dtensor
// Needed: 03_zero_fsdp, 07_tensor_parallel. Next: 12_sequence_parallel.

#include "chapters/07_tensor_parallel/lesson.cpp"

namespace shardbook::dtensor {

// --- the strategy
/// kShard: a part of dimension `dim`. kPartial: a term of the sum.
enum Kind { kReplicate, kShard, kPartial };
struct Placement {
  Kind kind = kReplicate;
  std::int64_t dim = 0;
};
struct DistributedTensor {
  Tensor local;
  Placement placement;
};

/// Changes the placement of a tensor: this is where messages come from.
inline DistributedTensor redistribute(const DistributedTensor& x, Placement to,
                                      ProcessGroup& mesh) {
  if (x.placement.kind == to.kind) return x;
  SB_CHECK(x.placement.kind == kPartial && to.kind == kReplicate, "not here");
  const auto add_up = [&mesh](const Tensors& in) {
    const Tensor sum = in[0].clone();
    mesh.all_reduce(sum).wait();
    return Tensors{sum};
  };
  // The gradient of a sum is whole on every rank
  const auto same = [](const Tensors& grad) { return grad; };
  return {autograd::custom_function("sum", {x.local}, add_up, same)[0], to};
}

/// Ranks use x differently, so the gradient of each is one term of a sum.
inline Tensor with_partial_gradient(const Tensor& x, ProcessGroup& mesh) {
  const auto same = [](const Tensors& in) { return Tensors{in[0].clone()}; };
  const auto whole = [&mesh](const Tensors& grad) {
    return Tensors{redistribute({grad[0], {kPartial}}, {}, mesh).local};
  };
  return autograd::custom_function("uses", {x}, same, whole)[0];
}

/// y = x W + b. The placement of the weight decides about that of the result.
inline DistributedTensor linear(Tensor x, const DistributedTensor& weight,
                                const Tensor& bias, ProcessGroup& mesh) {
  if (weight.placement.kind == kReplicate) {
    return {shardbook::linear(x, weight.local, bias), {kReplicate}};
  }
  if (weight.placement.dim == 1) {  // columns: x whole, y cut in its last dim
    x = with_partial_gradient(x, mesh);
    return {shardbook::linear(x, weight.local, bias), {kShard, 2}};
  }
  // Rows: x is cut in its last dim already, y is a sum; the bias comes after it
  x = shardbook::linear(x, weight.local);
  x = redistribute({x, {kPartial}}, {kReplicate}, mesh).local;
  return {add(x, bias), {kReplicate}};
}
// --- end

/// The plan says where each parameter of the mlp lies.
inline Placement plan(const std::string& name) {
  if (name == "fc1.weight") return {kShard, 1};
  if (name == "fc1.bias" || name == "fc2.weight") return {kShard, 0};
  return {kReplicate};
}

inline lesson::Result train(ProcessGroup& mesh) {
  // 1. Distribute the parameters by the plan
  const auto part = [&](const std::string& name, int r) {
    const Placement at = plan(name);
    return at.kind == kShard ? Shards{{at.dim, r, mesh.size()}} : Shards{};
  };
  const auto p = lesson::take_parts(mesh, part);
  const auto layer = [&](const Tensor& x, const std::string& name) {
    const std::string weight = name + ".weight";
    return linear(x, {p.at(weight), plan(weight)}, p.at(name + ".bias"), mesh);
  };
  const auto optimizer = lesson::sgd(lesson::values_of(p));
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. The model is that of one device
    const Batch batch = lesson::batch(step);
    Tensor x = embedding(p.at("wte.weight"), batch.inputs);
    for (const char* name : {"fc1", "fc2"}) {
      x = relu(
          layer(x, name).local);  // of each element, whatever the placement
    }
    const Tensor mean = language_loss(layer(x, "fc3").local, batch.targets);
    mean.backward();
    optimizer->step();
    lesson::clear_gradients(p);
    loss = mean.item();
  }
  return lesson::finish(mesh, loss, p, part);
}

/// The messages are those of column and row parallelism.
inline lesson::Lesson this_lesson() {
  return {/*ranks=*/{4, 2}, train, tensor_parallel::bill,
          lesson::mlp_on_one_device};
}

}  // namespace shardbook::dtensor

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::dtensor::this_lesson()); }
#endif

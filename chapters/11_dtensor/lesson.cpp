// DTensor on one screen: a tensor that knows how it lies over the ranks. Column
// and row parallelism are two choices of placements, and the messages follow.
//
//   ./shardbook lesson dtensor
// Read before: tensor parallelism. Read next: sequence parallelism.

#include "chapters/common/lesson.h"

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
  const auto all_reduce = [&mesh](const Tensors& in) {
    const Tensor sum = in[0].clone();
    mesh.all_reduce(sum).wait();
    return Tensors{sum};
  };
  const auto same = [](const Tensors& in) { return Tensors{in[0].clone()}; };
  if (x.placement.kind == to.kind) return x;
  if (x.placement.kind == kPartial && to.kind == kReplicate) {
    // The gradient of a sum is whole on every rank
    return {autograd::custom_function("sum", {x.local}, all_reduce, same)[0],
            to};
  }
  // Replicated to partial uses: each use gives a term of the gradient
  SB_CHECK(x.placement.kind == kReplicate, "no other change is needed here");
  return {autograd::custom_function("uses", {x.local}, same, all_reduce)[0],
          {kReplicate}};
}

/// y = x W + b. The placement of the weight decides about that of the result.
inline DistributedTensor linear(const DistributedTensor& x,
                                const DistributedTensor& weight,
                                const DistributedTensor& bias,
                                ProcessGroup& mesh) {
  if (weight.placement.kind == kReplicate) {
    return {shardbook::linear(x.local, weight.local, bias.local), {kReplicate}};
  }
  if (weight.placement.dim == 1) {  // columns: x whole, y cut in its last dim
    const Tensor whole = redistribute(x, {kPartial}, mesh).local;
    return {shardbook::linear(whole, weight.local, bias.local), {kShard, 2}};
  }
  // Rows: x is cut in its last dim already, y is a sum; the bias comes after it
  const DistributedTensor sum =
      redistribute({shardbook::linear(x.local, weight.local), {kPartial}},
                   {kReplicate}, mesh);
  return {add(sum.local, bias.local), {kReplicate}};
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
  const auto parameter = [&](const std::string& name) {
    return DistributedTensor{p.at(name), plan(name)};
  };
  const auto layer = [&](const DistributedTensor& x, const std::string& name) {
    return linear(x, parameter(name + ".weight"), parameter(name + ".bias"),
                  mesh);
  };
  const auto optimizer = lesson::sgd(lesson::values_of(p));
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 2. The model is that of one device
    const Batch batch = lesson::batch(step);
    DistributedTensor x = {embedding(p.at("wte.weight"), batch.inputs), {}};
    for (const char* name : {"fc1", "fc2"}) {
      x = layer(x, name);
      x.local = relu(x.local);  // of each element, whatever the placement
    }
    const Tensor mean = language_loss(layer(x, "fc3").local, batch.targets);
    mean.backward();
    optimizer->step();
    lesson::clear_gradients(p);
    loss = mean.item();
  }
  return lesson::finish(mesh, loss, p, part);
}

/// Ten steps send an all-reduce of [n, S, h] forward and one backward.
inline double bill(int /*rank*/, int t) {
  const double elements =
      lesson::kBatch * lesson::kSequence * lesson::config(lesson::kMlp).n_embd;
  return lesson::kSteps * 2 * (2.0 * (t - 1) / t) * elements * 8;
}

inline lesson::Lesson this_lesson() {
  return {/*ranks=*/4, train, bill, lesson::mlp_on_one_device};
}

}  // namespace shardbook::dtensor

#ifndef SHARDBOOK_LESSON_WITHOUT_MAIN
int main() { return compare(shardbook::dtensor::this_lesson()); }
#endif

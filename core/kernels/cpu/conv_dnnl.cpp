#include "core/kernels/cpu/dnnl_kernels.h"

#include <memory>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/kernels/cpu/dnnl_compat.h"
#include "core/kernels/cpu/parallel.h"
#include "core/kernels/cpu/plans.h"

namespace shardbook::kernels::cpu {

namespace {

using dnnl::memory;
using Plan = KernelContext::Plans::ConvPlan;

// The layout of the weight that a primitive prefers.
class WeightOrder : public KernelOrder {
 public:
  WeightOrder(memory::desc ordered, memory::desc plain)
      : ordered_(std::move(ordered)), plain_(std::move(plain)) {}

  bool equals(const KernelOrder& other) const override {
    const auto* order = dynamic_cast<const WeightOrder*>(&other);
    return order != nullptr && order->ordered_ == ordered_ &&
           order->plain_ == plain_;
  }

  void to_plain(KernelContext& context, const void* ordered,
                void* plain) const override {
    KernelContext::Plans& plans = context.plans();
    const dnnl::engine& engine = plans.engine;
    const memory from(ordered_, engine, const_cast<void*>(ordered));
    const memory to(plain_, engine, plain);
    dnnl::reorder(from, to).execute(plans.stream,
                                    {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}});
    plans.stream.wait();
  }

 private:
  memory::desc ordered_, plain_;
};

// Images keep our layout; the weight gets the one that the primitive prefers.
Plan make_plan(const dnnl::engine& engine, memory::data_type type,
               ConvPass pass, const ConvShape& s, bool with_bias) {
  const memory::desc x({s.n, s.in, s.h, s.w}, type, memory::format_tag::nhwc);
  const memory::desc y({s.n, s.out, s.out_h(), s.out_w()}, type,
                       memory::format_tag::nhwc);
  const memory::desc any({s.out, s.in, s.kh, s.kw}, type,
                         memory::format_tag::any);
  const memory::dims strides = {s.stride, s.stride};
  const memory::dims padding = {s.padding, s.padding};
  // Zeros behind the image: as many as the last window reaches.
  const memory::dims behind = {
      (s.out_h() - 1) * s.stride + s.kh - s.h - s.padding,
      (s.out_w() - 1) * s.stride + s.kw - s.w - s.padding};
  const auto direct = dnnl::algorithm::convolution_direct;
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  Plan plan;
  plan.x = x, plan.y = y;
  plan.own_weight = {{s.out, s.in, s.kh, s.kw}, type, memory::format_tag::oihw};
  if (with_bias) plan.bias = {{s.out}, type, memory::format_tag::a};

  using Forward = dnnl::convolution_forward;
  const auto kind = dnnl::prop_kind::forward_training;
  const Forward::primitive_desc forward =
      with_bias
          ? describe_primitive<Forward>(engine, attributes, kind, direct, x,
                                        any, plan.bias, y, strides, padding,
                                        behind)
          : describe_primitive<Forward>(engine, attributes, kind, direct, x,
                                        any, y, strides, padding, behind);
  const auto adopt = [&plan](const auto& chosen, const auto& weight,
                             dnnl::primitive primitive) {
    plan.weight = weight;
    plan.scratch = chosen.scratchpad_desc();
    plan.primitive = std::move(primitive);
  };
  if (pass == ConvPass::kForward) {
    adopt(forward, forward.weights_desc(), Forward(forward));
  } else if (pass == ConvPass::kBackwardData) {
    using Backward = dnnl::convolution_backward_data;
    const auto chosen =
        describe_backward<Backward>(engine, attributes, forward, direct, x, any,
                                    y, strides, padding, behind);
    adopt(chosen, chosen.weights_desc(), Backward(chosen));
  } else {
    using Backward = dnnl::convolution_backward_weights;
    const auto chosen =
        describe_backward<Backward>(engine, attributes, forward, direct, x, any,
                                    y, strides, padding, behind);
    adopt(chosen, chosen.diff_weights_desc(), Backward(chosen));
  }
  if (plan.weight != plan.own_weight) {
    const bool writes = pass == ConvPass::kBackwardWeight;
    plan.reorder = dnnl::reorder(dnnl::reorder::primitive_desc(
        engine, writes ? plan.weight : plan.own_weight, engine,
        writes ? plan.own_weight : plan.weight, attributes));
    plan.order = std::make_shared<WeightOrder>(plan.weight, plan.own_weight);
  }
  return plan;
}

const Plan& plan_of(KernelContext::Plans& plans, DType dtype, ConvPass pass,
                    const ConvShape& s, bool with_bias) {
  const KernelContext::Plans::Key key = {static_cast<std::int64_t>(dtype),
                                         static_cast<std::int64_t>(pass),
                                         s.n,
                                         s.h,
                                         s.w,
                                         s.in,
                                         s.out,
                                         s.kh,
                                         s.kw,
                                         s.stride,
                                         s.padding,
                                         with_bias ? 1 : 0,
                                         max_threads(),
                                         0};
  return plans.find_or_make("conv2d", plans.convolutions, key, [&] {
    return make_plan(plans.engine, plans.type_of(dtype), pass, s, with_bias);
  });
}

}  // namespace

bool conv_dnnl(KernelContext& context, DType dtype, ConvPass pass,
               const ConvShape& shape, void* x, void* weight, const void* bias,
               void* y, OrderedCopies* copies, SharedKernelOrder* order) {
  KernelContext::Plans& plans = context.plans();
  const Plan& plan = plan_of(plans, dtype, pass, shape, bias != nullptr);
  if (!plan.primitive) return false;

  Scratch scratch(context, plan.scratch.get_size());
  const auto wrap = [&](const memory::desc& desc, const void* data) {
    return memory(desc, plans.engine, const_cast<void*>(data));
  };
  const bool writes_weight = pass == ConvPass::kBackwardWeight;
  const memory own = wrap(plan.own_weight, weight);
  const std::size_t liked_bytes = plan.weight.get_size();
  const auto reorder = [&](void* to) {
    plan.reorder.execute(plans.stream, {{DNNL_ARG_FROM, own},
                                        {DNNL_ARG_TO, wrap(plan.weight, to)}});
  };
  // The array that the primitive sees as the weight: ours, a copy that is kept,
  // or scratch of this call
  void* liked_data = weight;
  bool is_left_in_order = false;
  std::unique_ptr<Scratch> ordered;
  if (plan.reorder) {
    // Blocks at the edge of an odd number of channels are padded
    is_left_in_order = writes_weight && order != nullptr &&
                       liked_bytes == plan.own_weight.get_size();
    if (copies != nullptr) {
      liked_data = copies->find_or_make(plan.order, liked_bytes, reorder);
    } else if (!is_left_in_order) {
      liked_data = nullptr;
    }
    if (liked_data == nullptr) {
      ordered = std::make_unique<Scratch>(context, liked_bytes);
      liked_data = ordered->data();
      if (!writes_weight) reorder(liked_data);
    }
  }
  const memory liked = wrap(plan.weight, liked_data);
  std::unordered_map<int, memory> arguments = {
      {DNNL_ARG_SCRATCHPAD, wrap(plan.scratch, scratch.data())}};
  arguments[pass == ConvPass::kBackwardData ? DNNL_ARG_DIFF_SRC
                                            : DNNL_ARG_SRC] = wrap(plan.x, x);
  arguments[writes_weight ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS] = liked;
  arguments[pass == ConvPass::kForward ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST] =
      wrap(plan.y, y);
  if (bias != nullptr) arguments[DNNL_ARG_BIAS] = wrap(plan.bias, bias);
  plan.primitive.execute(plans.stream, arguments);
  if (is_left_in_order) {
    *order = plan.order;
  } else if (plan.reorder && writes_weight) {
    plan.reorder.execute(plans.stream,
                         {{DNNL_ARG_FROM, liked}, {DNNL_ARG_TO, own}});
  }
  plans.stream.wait();
  return true;
}

}  // namespace shardbook::kernels::cpu

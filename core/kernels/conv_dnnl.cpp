#include "core/kernels/conv_dnnl.h"

#include <unordered_map>

#include "core/check.h"
#include "core/kernels/parallel.h"
#include "core/kernels/plans.h"

namespace shardbook::kernels {

namespace {

using dnnl::memory;
using Plan = KernelContext::Plans::ConvPlan;

// Images lie as ours do; the weight as the primitive likes it best.
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
  const Forward::primitive_desc forward(
      with_bias
          ? Forward::desc(kind, direct, x, any, plan.bias, y, strides, padding,
                          behind)
          : Forward::desc(kind, direct, x, any, y, strides, padding, behind),
      attributes, engine);
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
    const Backward::primitive_desc chosen(
        {direct, x, any, y, strides, padding, behind}, attributes, engine,
        forward);
    adopt(chosen, chosen.weights_desc(), Backward(chosen));
  } else {
    using Backward = dnnl::convolution_backward_weights;
    const Backward::primitive_desc chosen(
        {direct, x, any, y, strides, padding, behind}, attributes, engine,
        forward);
    adopt(chosen, chosen.diff_weights_desc(), Backward(chosen));
  }
  if (plan.weight != plan.own_weight) {
    const bool writes = pass == ConvPass::kBackwardWeight;
    plan.reorder = dnnl::reorder(dnnl::reorder::primitive_desc(
        engine, writes ? plan.weight : plan.own_weight, engine,
        writes ? plan.own_weight : plan.weight, attributes));
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
  auto found = plans.convolutions.find(key);
  if (found == plans.convolutions.end()) {
    Plan plan;
    try {
      plan = make_plan(plans.engine,
                       dtype == DType::kF32 ? memory::data_type::f32
                                            : memory::data_type::bf16,
                       pass, s, with_bias);
    } catch (const dnnl::error& error) {
      // Remember that there is none.
      SB_CHECK(error.status == dnnl_unimplemented,
               "conv2d: oneDNN: ", error.what());
    }
    found = plans.convolutions.emplace(key, std::move(plan)).first;
  }
  return found->second;
}

}  // namespace

bool conv_dnnl(KernelContext& context, DType dtype, ConvPass pass,
               const ConvShape& shape, void* x, void* weight, const void* bias,
               void* y) {
  KernelContext::Plans& plans = context.plans();
  const Plan& plan = plan_of(plans, dtype, pass, shape, bias != nullptr);
  if (!plan.primitive) return false;

  Scratch scratch(context, plan.scratch.get_size());
  Scratch ordered(context, plan.reorder ? plan.weight.get_size() : 0);
  const auto wrap = [&](const memory::desc& desc, const void* data) {
    return memory(desc, plans.engine, const_cast<void*>(data));
  };
  const bool writes_weight = pass == ConvPass::kBackwardWeight;
  const memory own = wrap(plan.own_weight, weight);
  const memory liked = plan.reorder ? wrap(plan.weight, ordered.data()) : own;
  if (plan.reorder && !writes_weight) {
    plan.reorder.execute(plans.stream,
                         {{DNNL_ARG_FROM, own}, {DNNL_ARG_TO, liked}});
  }
  std::unordered_map<int, memory> arguments = {
      {DNNL_ARG_SCRATCHPAD, wrap(plan.scratch, scratch.data())}};
  arguments[pass == ConvPass::kBackwardData ? DNNL_ARG_DIFF_SRC
                                            : DNNL_ARG_SRC] = wrap(plan.x, x);
  arguments[writes_weight ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS] = liked;
  arguments[pass == ConvPass::kForward ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST] =
      wrap(plan.y, y);
  if (bias != nullptr) arguments[DNNL_ARG_BIAS] = wrap(plan.bias, bias);
  plan.primitive.execute(plans.stream, arguments);
  if (plan.reorder && writes_weight) {
    plan.reorder.execute(plans.stream,
                         {{DNNL_ARG_FROM, liked}, {DNNL_ARG_TO, own}});
  }
  plans.stream.wait();
  return true;
}

}  // namespace shardbook::kernels

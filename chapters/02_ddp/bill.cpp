#include "chapters/02_ddp/bill.h"

#include <algorithm>

#include "chapters/common/run/report.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::ddp {
namespace {

bool finds_unused(const DdpOptions& ddp) {
  return ddp.find_unused_parameters && !ddp.static_graph;
}

/// Seconds from the beginning of backward to the gradient of this parameter:
/// "fc3.weight", or "transformer.h.3.attn.c_proj.weight".
double ready_s(const std::string& parameter, const Options& options,
               const StepTime& step) {
  const auto times =
      textbook::model_times(options, step.config, step.rows, step.recompute);
  const auto gpt = textbook::gpt_times(options, step.config, step.rows);
  const auto has = [&](const std::string& part) {
    return !part.empty() && parameter.find(part) != std::string::npos;
  };
  const DecoderNames names = decoder_names(step.config);
  // A head that shares the embedding's table gets its gradient last
  if (has("wte") || has(names.table) || has(names.positions)) {
    return times.backward();
  }
  if (has(names.norm) || has(names.head)) return times.head_backward;
  const double layer =
      std::stod(parameter.substr(parameter.find_first_of("0123456789")));
  if (step.config.type == "mlp") {
    return (times.layers + 1 - layer) * times.layer_backward;
  }
  // What is left of the same block's backward: the parts in front of this one
  double after = 0;
  for (const BlockPart& part : block_table(step.config).parts()) {
    if (!part.name.empty() && has("." + part.name + ".")) break;
    after += gpt.product(part.backward_operations(gpt.seq));
  }
  return times.head_backward + (times.layers - layer) * times.layer_backward -
         after;
}

}  // namespace

BillSizes bill_sizes(Module& module, const DdpOptions& ddp, int ranks,
                     std::int64_t steps, std::optional<DType> wire) {
  const Tensors parameters = module.parameters();
  BillSizes sizes;
  sizes.ranks = ranks;
  sizes.steps = steps;
  sizes.elements = static_cast<double>(module.num_parameters());
  sizes.tensors = static_cast<double>(parameters.size());
  const DType dtype = parameters.at(0).dtype();
  sizes.element_bytes = static_cast<double>(dtype_bytes(dtype));
  if (wire && *wire != dtype) {
    sizes.wire_bytes = static_cast<double>(dtype_bytes(*wire));
  }
  sizes.ddp = ddp;
  return sizes;
}

double predicted_bytes(const BillSizes& s) {
  if (s.ranks == 1) return 0;
  const auto steps = static_cast<double>(s.steps);
  // Broadcast the weights once, and the order of the buckets
  double broadcast = s.elements * s.element_bytes;
  if (s.steps >= 2 && !finds_unused(s.ddp)) broadcast += 4 * s.tensors;
  // Each step all-reduces the gradients, and a map of the parameters in use
  const double wire = s.wire_bytes > 0 ? s.wire_bytes : s.element_bytes;
  double all_reduced = steps * s.elements * wire;
  if (finds_unused(s.ddp)) all_reduced += steps * 4 * s.tensors;
  if (s.ddp.static_graph && s.steps >= 1) all_reduced += 4 * s.tensors;
  return (s.ranks - 1) * (broadcast + 2 * all_reduced) / s.ranks;
}

double step_s(const Options& options, const StepTime& step, Module& module,
              const DistributedDataParallel& ddp) {
  if (!textbook::has_model_times(options, step.config)) return kNotPredicted;
  // The first step of a static graph counts uses, and sends at its end
  if (ddp.options().static_graph && options.steps < 2) return kNotPredicted;
  const auto times =
      textbook::model_times(options, step.config, step.rows, step.recompute);
  const auto parameters = module.named_parameters();
  // After the loss, buckets leave one by one, each when its last gradient has
  // been computed
  double sent = textbook::all_reduce(step.ranks, 8);
  for (const BucketMembers& bucket : ddp.reducer().buckets()) {
    double elements = 0;
    for (const int i : bucket) {
      const NamedTensor& each = parameters[static_cast<std::size_t>(i)];
      elements += static_cast<double>(each.tensor.numel());
      sent = std::max(sent, ready_s(each.name, options, step));
    }
    sent += textbook::all_reduce(step.ranks, elements * step.wire_bytes);
  }
  if (finds_unused(ddp.options())) {
    sent += textbook::all_reduce(step.ranks,
                                 4 * static_cast<double>(parameters.size()));
  }
  // The second step first broadcasts the order of the buckets
  const bool orders = options.steps == 2 && !finds_unused(ddp.options());
  return (orders ? textbook::broadcast(
                       step.ranks, 4 * static_cast<double>(parameters.size()))
                 : 0) +
         (step.micro_batches - 1) * (times.forward() + times.backward()) +
         times.forward() + std::max(sent, times.backward());
}

}  // namespace shardbook::ddp

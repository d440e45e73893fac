#include "chapters/01_data_parallel/bill.h"

#include <algorithm>

#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/common/run/kept.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::data_parallel {

double bytes_of(const Tensors& tensors) {
  double bytes = 0;
  for (const Tensor& tensor : tensors) {
    bytes += static_cast<double>(tensor.bytes());
  }
  return bytes;
}

std::vector<Traffic> step_traffic(std::int64_t batch, int num_devices,
                                  double row_bytes_in, double row_bytes_out,
                                  double parameter_bytes, double buffer_bytes) {
  std::vector<Traffic> traffic(static_cast<std::size_t>(num_devices));
  const auto chunks = ceil_chunks(batch, num_devices);
  const double others = static_cast<double>(chunks.size() - 1);
  for (std::size_t i = 1; i < chunks.size(); ++i) {
    const double rows = static_cast<double>(chunks[i].second - chunks[i].first);
    traffic[0].scatter_inputs += rows * row_bytes_in;
    traffic[0].scatter_gradients += rows * row_bytes_out;
    traffic[i].gather_outputs = rows * row_bytes_out;
    traffic[i].reduce_gradients = parameter_bytes;
  }
  traffic[0].replicate = others * (parameter_bytes + buffer_bytes);
  return traffic;
}

std::vector<Traffic> step_traffic(const Options& options,
                                  const ModelConfig& config) {
  const auto seq = static_cast<double>(options.seq);
  const double parameters =
      single_device_bill(options, config, 1)[MemoryKind::kParameter];
  return step_traffic(options.batch, options.world_size, seq * 8,
                      seq * static_cast<double>(config.vocab_size) *
                          static_cast<double>(dtype_bytes(options.dtype)),
                      parameters, 0);
}

std::vector<MemoryBill> memory_bills(const Options& options,
                                     const ModelConfig& config, Module& model) {
  const auto n = static_cast<std::size_t>(options.world_size);
  std::vector<MemoryBill> bills(n);
  for (MemoryBill& bill : bills) bill.bytes.fill(0);
  bills[0] = single_device_bill(options, config, options.batch);
  const auto chunks = ceil_chunks(options.batch, options.world_size);
  if (options.steps == 0 || chunks.size() == 1) return bills;

  const double parameter_bytes = bytes_of(model.parameters());
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    // Activations of the device's own rows; logits and loss are on main
    KeptSizes sizes = kept_sizes(options, chunks[i].second - chunks[i].first);
    const auto logits = [&](double rows) {
      return rows * sizes.tokens *
             (static_cast<double>(config.vocab_size) * sizes.element +
              sizes.stat);
    };
    MemoryBill& bill = bills[i];
    double& kept = bill[MemoryKind::kActivation];
    kept = kept_by_model(config, sizes);
    const bool is_known = kept != kNoClaim;
    if (is_known) kept -= logits(sizes.rows) + sizes.stat;
    if (i == 0) {
      if (is_known) {
        kept += logits(static_cast<double>(options.batch)) + sizes.stat;
      }
      continue;
    }
    bill[MemoryKind::kParameter] = bill[MemoryKind::kGradient] =
        parameter_bytes;
  }
  return bills;
}

double step_s(const Options& options, const ModelConfig& config,
              Module& model) {
  using textbook::message;
  const int n = options.world_size;
  if (!textbook::has_model_times(options, config) || options.batch % n != 0 ||
      coalesce(model.parameters()).size() > 1) {
    return kNotPredicted;
  }
  const double rows = static_cast<double>(options.batch / n);
  const auto times = textbook::model_times(options, config, rows);
  const double tokens = rows * static_cast<double>(options.seq);
  const double logits = tokens * static_cast<double>(config.vocab_size) *
                        static_cast<double>(dtype_bytes(options.dtype));
  // The main device sends or receives one message at a time, and computes in
  // between. It receives outputs and returns their gradients.
  const double messages = message(8 * tokens) +
                          2 * message(bytes_of(model.parameters())) +
                          2 * message(logits);
  return times.forward() + times.backward() + (n - 1) * messages;
}

}  // namespace shardbook::data_parallel

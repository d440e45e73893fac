#pragma once

// What the notebook 01_data_parallel calls: small inputs, runs, and pictures of
// what they counted.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/01_data_parallel/bill.h"
#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/programs/programs.h"
#include "notebooks/lessons.h"

namespace notes {

using namespace shardbook::notebook;

/// 0, 1, 2, ... as rows of two.
inline Tensor numbers(std::int64_t rows, const Device& device) {
  const TensorOptions options{DType::kF32, device};
  return reshape(Tensor::arange(2 * rows, options), {rows, 2});
}

/// The rows that each device gets.
inline Picture shares(std::int64_t rows, int num_devices) {
  Rows lines = {{"device", "rows"}};
  for (const auto& [begin, end] :
       data_parallel::ceil_chunks(rows, num_devices)) {
    lines.push_back(cells(lines.size() - 1, joined(begin, " to ", end - 1)));
  }
  return table(lines);
}

/// One forward and backward.
struct Step {
  std::vector<std::vector<CommRecord>> records = {};  ///< by device
  Tensor gradient = {};                               ///< of the weight
};

inline std::vector<std::vector<CommRecord>> records_of(
    const data_parallel::DataParallel& model) {
  return mapped(model.device_ids(), [&](const Device& device) {
    return model.ledger()->records(device);
  });
}

/// The bytes that each device sends, a line per copy.
inline Picture sent(const Step& step) {
  Rows rows = {{"copy", "for"}};
  for (std::size_t device = 0; device < step.records.size(); ++device) {
    rows[0].push_back(joined("device ", device));
  }
  for (std::size_t i = 0; i < step.records[0].size(); ++i) {
    const CommRecord& record = step.records[0][i];
    rows.push_back({comm_op_name(record.op), record.label});
    for (const auto& records : step.records) {
      rows.back().push_back(fixed(bytes_sent(records[i]), 0));
    }
  }
  return table(rows);
}

/// gpt-nano on four devices of this machine.
inline const std::string kSmall =
    "01_data_parallel --world-size 4 --batch 8 --steps 8" + kNano;

/// The bytes that leave device 0, and those that leave each device of a ring.
inline Picture hot_spot(std::int64_t batch, const std::vector<int>& sizes) {
  std::vector<Bar> all;
  for (const int d : sizes) {
    const Options options =
        options_of(joined(kSmall, " --batch ", batch, " --world-size ", d));
    const LoadedModel loaded = build_model(options);
    const double weights =
        4.0 * static_cast<double>(loaded.model->num_parameters());
    all.push_back(
        {joined(d, " devices, device 0"),
         data_parallel::step_traffic(options, loaded.config)[0].total()});
    all.push_back({joined(d, " devices, a ring"), 2.0 * (d - 1) / d * weights});
  }
  return bars("Device 0 sends more with every device, a ring hardly", all,
              {"KiB", 1024}, "comm");
}

/// The step of one device over that of several, for the same batch of GPT-2,
/// whose samples have 1024 tokens.
inline Picture speedups(int devices, const std::vector<int>& samples,
                        double limit) {
  std::vector<Bar> all;
  for (const int each : samples) {
    const std::string line =
        joined("01_data_parallel --model gpt2 --seq 1024 --steps 3 --no-check",
               kTextbook, " --batch ", devices * each, " --world-size ");
    all.push_back(
        {std::to_string(1024 * each),
         step_s(run(line + "1")) / step_s(run(joined(line, devices)))});
  }
  return curve(joined("Few tokens per device make ", devices,
                      " devices slower than one"),
               all, "tokens each", {"one device", 1},
               {"limit for any number of devices", limit}, {"", 1});
}

inline bool are_shares_right(double rows_of_last, double devices_with_rows) {
  const auto [begin, end] = data_parallel::ceil_chunks(10, 4).back();
  const std::size_t devices = data_parallel::ceil_chunks(9, 8).size();
  return rows_of_last == static_cast<double>(end - begin) &&
         devices_with_rows == static_cast<double>(devices);
}

/// From the chapter's bill, for rows of no bytes: only weights and gradients.
inline double through_main(double d, double weight_bytes) {
  double bytes = 0;
  for (const data_parallel::Traffic& device : data_parallel::step_traffic(
           /*batch=*/static_cast<std::int64_t>(d), static_cast<int>(d), 0, 0,
           weight_bytes, 0)) {
    bytes += device.total();
  }
  return bytes;
}

}  // namespace notes

#include "bench/validate/kinds.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <regex>
#include <sstream>

#include "core/check.h"

namespace shardbook::validate {
namespace {

std::string joined(const std::vector<std::string>& words) {
  return fmt::format("{}", fmt::join(words, ", "));
}

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

std::vector<std::string> missing(const Kind& kind,
                                 const std::vector<std::string>& columns) {
  std::vector<std::string> result;
  for (const std::string& name : words(kind.columns)) {
    if (std::ranges::find(columns, name) == columns.end()) {
      result.push_back(name);
    }
  }
  return result;
}

/// A column that is not read would change nothing.
void check_columns(const std::string& label, const Kind& kind,
                   const std::vector<std::string>& columns) {
  if (kind.more.empty()) return;
  const std::vector<std::string> known = words(kind.columns + " " + kind.more);
  for (const std::string& column : columns) {
    SB_CHECK(std::ranges::find(known, column) != known.end(), label,
             ": column ", column, " is unknown in a table of ", kind.name,
             "; known are ", joined(known));
  }
}

}  // namespace

std::vector<double> numbers_in(const Row& row, const char* column,
                               const char* pattern) {
  std::smatch found;
  const std::string& text = row.text(column);
  // std::regex calls itself for each character
  if (text.size() < 1000) std::regex_match(text, found, std::regex(pattern));
  std::vector<double> numbers;
  for (std::size_t i = 1; i < found.size(); ++i) {
    numbers.push_back(std::stod(found[i].str()));
  }
  return numbers;
}

const std::vector<Kind>& kinds() {
  constexpr bool kTime = true, kRate = false;  // whether lower is better
  const Aim digits = {AimKind::kDigits, 0, "every row to the printed digit"};
  const auto within = [](double percent) {
    return Aim{AimKind::kMean, percent / 100,
               fmt::format("MAPE within {:g} %", percent)};
  };
  const auto order = [](double spearman, const char* rivals) {
    return Aim{
        AimKind::kOrder, spearman,
        fmt::format("the order of the {}: Spearman {:g}", rivals, spearman)};
  };
  const char* const bubble =
      "a rank's bubble is the part of the time from its first action to its "
      "last in which it idles; the largest of all ranks";
  static const std::vector<Kind> all = {
      {"jobs", "devices cluster batch seq dtype measured unit", kRate,
       within(10), job, "",
       "row model layers hidden heads vocab software tp pp vpp cp ep dp zero "
       "sp micro_batch dropout recompute schedule overlap contest apart "
       "source"},
      {"zero_table1_memory",
       "model params optimizer zero_stage dp per_device_GB_reported", kTime,
       digits, model_states},
      {"zero_table2_max_model",
       "mp gpu dp baseline_theory_B pos_theory_B pos_g_theory_B "
       "pos_g_p_theory_B",
       kRate, within(1), largest_models,
       "the paper multiplies the digits of its first row by the degree of "
       "model parallelism, and prints trillions with one digit; measured sizes "
       "(baseline_measured_B, pos_measured_B) are not predicted, as the paper "
       "names no batch"},
      {"deepspeed_memory_estimator",
       "model params largest_layer_params gpus zero_stage per_gpu_GiB", kTime,
       digits, deepspeed_estimates},
      {"nccl_collectives",
       "gpu ranks collective size_bytes time_us",
       kTime,
       {AimKind::kWorst, 0.10, "every row above 16 MB within 10 %"},
       collective_time},
      {"nccl_busbw_reference",
       "fabric allreduce_busbw_GBps",
       kRate,
       {AimKind::kWorst, 0.10, "every row within 10 %"},
       bus_bandwidth},
      {"zero_bubble_table5",
       "model pp num_microbatches schedule T_F_ms T_B_ms T_W_ms T_comm_ms "
       "bubble_rate",
       kTime, digits, bubble_rate, bubble},
      {"zero_bubble_automatic",
       "model hidden heads seq_len pp num_microbatches memory_limit_per_stage "
       "T_F_ms T_B_ms T_W_ms T_comm_ms bubble_rate",
       kTime, digits, automatic_bubble_rate, bubble},
      {"gpipe_table1_memory",
       "model config partitions rematerialization params bytes_per_param "
       "param_memory_GB peak_activation_GB",
       kTime, within(10), gpipe_memory,
       "micro-batches are taken as single sequences (32 of them); rows of "
       "AmoebaNet agree better in decimal GB; its activations, and those of "
       "rows without re-materialisation, whose batch did not fit, are not "
       "predicted"},
      {"gpipe_throughput",
       "table model partitions_K micro_batches_M normalized_throughput", kRate,
       order(0.9, "rows"), gpipe_throughput,
       "batches are taken as 32 sequences; the paper lets them grow with the "
       "memory of more devices, which lifts its rows with few micro-batches "
       "above the bound of the bubble"},
      {"torchgpipe",
       "benchmark experiment speedup partitions micro_batches params "
       "memory_GiB",
       kRate, order(0.9, "rows"), torchgpipe,
       "AmoebaNet and U-Net are taken as equal stages, whose speed is bounded "
       "by the bubble alone"},
      {"pytorch_mp_tutorial",
       "model batch image num_batches gpus variant split_size time_s", kTime,
       order(1, "rows"), tutorial,
       "the tutorial names no device: the cluster is k80-pcie, whose speed is "
       "fitted to the first row"},
      {"korthikanti_table4_layer",
       "model hidden heads seq_len micro_batch tp unit experiment forward_ms "
       "backward_ms hardware",
       kTime, within(8), korthikanti_layer,
       "one constant was fitted to this table: the speed of the software of "
       "2022 (megatron-lm-2022)"},
      {"ring_flash_attention",
       "api gpu phase world tokens_per_gpu shape variant iter_per_s", kRate,
       order(1, "variants"), ring_flash_attention},
      {"ulysses_charts",
       "model gpus system seq_len tflops_per_gpu outcome hardware", kRate,
       order(1, "systems"), ulysses_charts,
       "the charts print neither sizes nor batch: GPT-3's 6.7B, OPT's 30B with "
       "64 heads, and a million tokens per step, over all GPUs; weights are "
       "whole (Ulysses) or cut (Megatron-LM), where the authors used ZeRO-3"},
      {"megatron_ci_memory",
       "test env hardware tp pp cp ep dp_derived layers hidden heads seq mbs "
       "fp16 fp8 sp dist_opt recompute impl attn_backend "
       "mem_max_allocated_bytes",
       kTime, within(10), megatron_ci,
       "times of these small models are the host's, and are not predicted"},
  };
  return all;
}

const Kind& recognise(const std::string& label,
                      const std::vector<std::string>& columns) {
  const Kind* best = nullptr;
  for (const Kind& kind : kinds()) {
    if (missing(kind, columns).empty() &&
        (best == nullptr ||
         words(kind.columns).size() > words(best->columns).size())) {
      best = &kind;
    }
  }
  if (best != nullptr) {
    check_columns(label, *best, columns);
    return *best;
  }
  std::vector<std::string> known;
  for (const Kind& kind : kinds()) known.push_back(kind.name);
  const Kind& nearest = *std::ranges::min_element(
      kinds(), {},
      [&](const Kind& kind) { return missing(kind, columns).size(); });
  SB_FAIL(label, ": no known kind of table has the columns ", joined(columns),
          "; known are ", joined(known), ". The nearest is ", nearest.name,
          ", which also needs ", joined(missing(nearest, columns)));
}

void check_jobs(const Table& table) {
  const Kind& jobs = kinds().front();
  const std::vector<std::string> lacks = missing(jobs, table.columns);
  SB_CHECK(lacks.empty(), "--jobs ", table.file, ": has no column ",
           joined(lacks), "; a table of jobs has ", joined(words(jobs.columns)),
           " and what else describes a step (bench/own_rows.md)");
  check_columns(table.file, jobs, table.columns);
}

}  // namespace shardbook::validate

// The sections of the optimizer and of its schedule.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>

#include "chapters/15_engine/internal/config_writer.h"

namespace shardbook::engine::internal {

bool has_word(const std::string& text, const std::string& word) {
  return word.find(' ') == std::string::npos &&
         (" " + text + " ").find(" " + word + " ") != std::string::npos;
}

namespace {

using json_file::Json;
using json_file::JsonObject;

/// The usual case of a type; DeepSpeed accepts any.
std::string with_usual_case(const std::string& type) {
  const std::string lower = lower_case(type);
  return lower == "adam" ? "Adam" : lower == "adamw" ? "AdamW" : type;
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

/// Types that the book does not have, in lower case.
struct Others {
  const char* names;
  const char* why;
};

/// A type that is offered; `others` have reasons of their own.
void read_type(JsonObject& section, const std::vector<std::string>& offered,
               const std::vector<Others>& others, std::string& type) {
  const Json* json = section.find("type");
  const std::string names = json_file::list(offered);
  section.check(json != nullptr, section.where("type"), ": missing; give ",
                names);
  if (json == nullptr) return;
  std::string given;
  section.text("type", given);
  if (given.empty()) return;
  given = with_usual_case(given);
  if (std::find(offered.begin(), offered.end(), given) != offered.end()) {
    type = given;
    return;
  }
  std::string why = "is unknown";
  for (const Others& each : others) {
    if (has_word(each.names, lower_case(given))) why = each.why;
  }
  section.check(false, section.where("type"), ": \"",
                json_file::printable(given), "\" ", why, "; give ", names);
}

void betas(JsonObject& object, OptimizerOptions& to) {
  const Json* pair = object.find("betas");
  if (pair == nullptr) return;
  const std::string where = object.where("betas");
  const bool is_pair = pair->is_array() && pair->size() == 2;
  object.check(is_pair, where, ": ", json_file::printable(*pair),
               " is not allowed; give two numbers below 1, such as "
               "[0.9, 0.999]");
  if (!is_pair) return;
  const double below_1 = std::nextafter(1.0, 0.0);
  const auto read = [&](const std::string& number, const Json& json,
                        double& value) {
    object.attempt([&] {
      value = json_file::number_at(json, where + number, 0, below_1);
    });
  };
  read("/0", (*pair)[0], to.beta1);
  read("/1", (*pair)[1], to.beta2);
}

void betas(Writer& object, const OptimizerOptions& to) {
  object.list("betas", std::vector<double>{to.beta1, to.beta2});
}

template <typename Fields>
void optimizer_params(Fields& object, OptimizerConfig& optimizer) {
  OptimizerOptions& to = optimizer.params;
  object.number("lr", 0, kMostNumber, to.lr);
  object.number("weight_decay", 0, kMostNumber, to.weight_decay);
  if (optimizer.type == "SGD") {
    object.number("momentum", 0, kMostNumber, to.momentum);
    object.number("dampening", -kMostNumber, kMostNumber, to.dampening);
    object.flag("nesterov", to.nesterov);
  } else {
    betas(object, to);
    object.number("eps", 0, kMostNumber, to.eps);
  }
}

void read_adam(JsonObject& object, OptimizerConfig& optimizer,
               std::vector<std::string>& remarks) {
  bool adam_w_mode = true;
  object.flag("adam_w_mode", adam_w_mode);
  if (optimizer.type == "Adam") {
    optimizer.adam_w_mode = adam_w_mode;
  } else if (object.find("adam_w_mode") != nullptr) {
    remarks.emplace_back(
        "/optimizer/params/adam_w_mode: has no effect here: AdamW is AdamW "
        "with or without it");
  }
  object.flag("torch_adam", optimizer.torch_adam);
  if (object.find("torch_adam") == nullptr) return;
  const bool decays = optimizer.torch_adam && optimizer.name() == "adamw" &&
                      object.find("weight_decay") == nullptr;
  if (decays) optimizer.params.weight_decay = kTorchWeightDecay;
  remarks.emplace_back(
      decays ? "torch_adam without weight_decay: 0.01, the default of "
               "PyTorch's AdamW; that of DeepSpeed's own is 0"
             : "/optimizer/params/torch_adam: has no effect here: it chooses "
               "among programs for the same update");
}

/// DeepSpeed's class for this config, and the parameters that it has.
struct Class {
  std::string name, parameters;
};

Class optimizer_class(const DeepSpeedConfig& config) {
  const OptimizerConfig& optimizer = config.optimizer;
  if (optimizer.type == "SGD") {
    return {"PyTorch's SGD",
            "lr weight_decay momentum dampening nesterov maximize foreach "
            "fused differentiable"};
  }
  const std::string all =
      "lr weight_decay betas eps adam_w_mode torch_adam fp32_optimizer_states ";
  if (optimizer.torch_adam) {
    const std::string torch =
        all + "amsgrad maximize foreach fused capturable differentiable";
    if (optimizer.name() == "adamw") return {"PyTorch's AdamW", torch};
    return {"PyTorch's Adam", torch + " decoupled_weight_decay"};
  }
  if (config.zero.offload_optimizer) {
    return {"DeepSpeedCPUAdam", all + "bias_correction amsgrad"};
  }
  return {"FusedAdam", all + "bias_correction amsgrad set_grad_none"};
}

Class scheduler_class(const DeepSpeedConfig& config) {
  const std::string warmup =
      "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type "
      "last_batch_iteration";
  const std::string& type = config.scheduler.type;
  return {type, type == "WarmupDecayLR" ? warmup + " total_num_steps" : warmup};
}

void max_lr(JsonObject& object, SchedulerConfig& scheduler) {
  const Json* most = object.find("warmup_max_lr");
  const bool is_optimizers =
      most != nullptr ? most->is_null() : scheduler.type == "WarmupLR";
  if (is_optimizers) return;
  object.number("warmup_max_lr", 0, kMostNumber,
                scheduler.warmup_max_lr.emplace(1e-3));
}
void max_lr(Writer& object, const SchedulerConfig& scheduler) {
  if (scheduler.warmup_max_lr) {
    object.number("warmup_max_lr", 0, 0, *scheduler.warmup_max_lr);
  } else if (scheduler.type == "WarmupDecayLR") {
    object.null("warmup_max_lr");
  }
}

template <typename Fields>
void scheduler_params(Fields& object, SchedulerConfig& scheduler) {
  object.number("warmup_min_lr", 0, kMostNumber, scheduler.warmup_min_lr);
  max_lr(object, scheduler);
  object.whole("warmup_num_steps", 1, kMostCount, scheduler.warmup_num_steps);
  object.choice("warmup_type", {"log", "linear"}, scheduler.warmup_type);
  if (scheduler.type != "WarmupDecayLR") return;
  object.whole("total_num_steps", -kMostCount, kMostCount,
               scheduler.total_num_steps);
}

}  // namespace

void write_optimizer(Writer& root, DeepSpeedConfig& config) {
  OptimizerConfig& optimizer = config.optimizer;
  if (!optimizer.type.empty()) {
    Writer object = section(root, "optimizer");
    object.text("type", optimizer.type);
    Writer params = section(object, "params");
    optimizer_params(params, optimizer);
    if (optimizer.type == "Adam") {
      params.flag("adam_w_mode", optimizer.adam_w_mode);
    }
    if (optimizer.torch_adam) params.flag("torch_adam", true);
  }
  if (config.allows_untested_optimizer) {
    root.flag("zero_allow_untested_optimizer", true);
  }
  if (!config.scheduler.type.empty()) {
    Writer object = section(root, "scheduler");
    object.text("type", config.scheduler.type);
    Writer params = section(object, "params");
    scheduler_params(params, config.scheduler);
  }
}

void read_optimizer(JsonObject& root, DeepSpeedConfig& config) {
  root.flag("zero_allow_untested_optimizer", config.allows_untested_optimizer);
  JsonObject parent = section(root, "optimizer");
  if (!has_object(root, "optimizer")) return;
  OptimizerConfig& optimizer = config.optimizer;
  constexpr const char* kDeepSpeeds =
      "is DeepSpeed's, but not offered: its updates are other ones";
  read_type(parent, {"Adam", "AdamW", "SGD"},
            {{"lamb adagrad lion muadam muadamw musgd muon", kDeepSpeeds},
             {"adadelta adafactor adamax asgd lbfgs nadam radam rmsprop rprop "
              "sparseadam",
              "is PyTorch's, but not offered: its updates are other ones"},
             {"onebitadam onebitlamb zerooneadam",
              "is not DeepSpeed's any more (0.19.8)"}},
            optimizer.type);
  JsonObject object = section(parent, "params");
  if (optimizer.type.empty()) return;
  optimizer_params(object, optimizer);
  if (optimizer.type != "SGD") {
    read_adam(object, optimizer, config.remarks);
    return;
  }
  const OptimizerOptions& to = optimizer.params;
  object.check(!to.nesterov || (to.momentum > 0 && to.dampening == 0),
               object.where("nesterov"),
               ": true needs a momentum above 0 and a dampening of 0");
}

void read_scheduler(JsonObject& root, DeepSpeedConfig& config) {
  JsonObject parent = section(root, "scheduler");
  if (!has_object(root, "scheduler")) return;
  SchedulerConfig& scheduler = config.scheduler;
  constexpr const char* kPyTorchs =
      "is PyTorch's, but not offered: its rates are other ones";
  read_type(parent, {"WarmupLR", "WarmupDecayLR"},
            {{"lrrangetest onecycle warmupcosinelr",
              "is DeepSpeed's, but not offered: its rates are other ones"},
             {"steplr multisteplr constantlr linearlr exponentiallr "
              "polynomiallr cosineannealinglr cosineannealingwarmrestarts "
              "cycliclr onecyclelr reducelronplateau",
              kPyTorchs}},
            scheduler.type);
  JsonObject object = section(parent, "params");
  if (scheduler.type.empty()) return;
  parent.check(parent.find("params") != nullptr, parent.where("params"),
               ": missing; DeepSpeed's ", scheduler.type,
               " needs it; give {} for the defaults");
  if (!has_object(parent, "params")) return;
  scheduler_params(object, scheduler);
  const Json* steps = object.find("warmup_num_steps");
  object.check(steps == nullptr || !steps->is_number_float(),
               object.where("warmup_num_steps"), ": ",
               steps != nullptr ? json_file::printable(*steps) : "",
               " is not allowed; DeepSpeed wants a whole number without a "
               "point or an exponent here");
  if (scheduler.type != "WarmupDecayLR") return;
  object.check(object.find("total_num_steps") != nullptr,
               object.where("total_num_steps"),
               ": missing; WarmupDecayLR needs the step at which the rate has "
               "come down");
  // An end before the first step is as one at it: the warm-up comes first
  scheduler.total_num_steps =
      std::max<std::int64_t>(1, scheduler.total_num_steps);
}

void check_parameters(JsonObject& root,
                      const std::vector<std::string>& parameters,
                      const DeepSpeedConfig& config) {
  const auto check = [&](const std::string& section, const std::string& type,
                         const Class& created) {
    if (type.empty()) return;
    for (const std::string& path : parameters) {
      if (path.rfind(section, 0) != 0) continue;
      const std::string key = path.substr(section.size());
      root.check(has_word(created.parameters, key), root.file(), ": ", path,
                 ": ", created.name, ", which DeepSpeed creates for ", type,
                 ", has no such parameter; leave it out, or give ",
                 json_file::list(words_of(created.parameters)));
    }
  };
  check("/optimizer/params/", config.optimizer.type, optimizer_class(config));
  check("/scheduler/params/", config.scheduler.type, scheduler_class(config));
}

}  // namespace shardbook::engine::internal

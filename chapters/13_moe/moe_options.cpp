// The chapter's own options.

#include <numeric>

#include "chapters/13_moe/moe_strategy.h"
#include "chapters/common/run/option_values.h"
#include "core/check.h"

namespace shardbook::moe {

void add_options(CommandLine& line, StrategyOptions& setup) {
  GateOptions& gate = setup.moe.gate;
  struct Names {
    std::string num_experts = "8", noise = "none", drop_policy = "probs";
  };
  const auto names = std::make_shared<Names>();
  line.add("--num-experts", &names->num_experts,
           "experts of each layer, or a list (a pyramid): 4,8 gives the first "
           "layer 4 and all others 8; 1 is an ordinary MLP")
      .otherwise("1");
  line.add({"--ep", may_differ::kRanks}, &setup.ep,
           "ranks that share a set of experts; 0: as many as possible");
  line.add({"--tp", may_differ::kRanks}, &setup.tp, "tensor-parallel ranks", 1);
  line.add({"--data-before-expert", may_differ::kRanks},
           &setup.data_before_expert,
           "ranks with the same experts are neighbours");
  line.add({"--expert-tp", may_differ::kRanks},
           &setup.moe.expert_tensor_parallel,
           "TP cuts experts' hidden units, not their slots");
  line.add({"--zero-stage", may_differ::kPlace}, &setup.zero_stage,
           "ZeRO: dense parameters over DP, experts over their replicas", 0, 3);
  line.add({"--cpu-offload", may_differ::kPlace}, &setup.cpu_offload,
           "--zero-stage 2: the optimizer on the host");
  line.add(
      {"--micro-batches", "the tokens that are routed together are compared"},
      &setup.micro_batches, "micro-batches per step", 1);
  line.add("--top-k", &gate.k, "experts that a token visits", 1);
  line.add("--capacity-factor", &gate.capacity_factor,
           "slots of an expert, as a multiple of an even load", 0.01);
  line.add("--min-capacity", &gate.min_capacity, "the fewest slots", 0,
           1 << 20);
  line.add("--drop-tokens", &gate.drop_tokens,
           "full experts drop tokens; no-: the busiest one sets the slots");
  line.add("--dropless", &setup.moe.is_dropless,
           "no slots: rows are sorted by expert");
  line.add("--use-rts", &gate.use_rts,
           "--top-k 1: random tokens stay, not the first ones");
  line.add("--noise", &names->noise, "noise in the gate", noise_names());
  line.add("--second-expert-sampling", &gate.second_expert_sampling,
           "--top-k 2: the second expert is sampled");
  line.add("--drop-policy", &names->drop_policy,
           "--top-k 3 and more: which choices stay", {"probs", "position"});
  line.add("--residual", &setup.moe.use_residual,
           "an MLP beside the experts, weighed per token (PR-MoE)");
  line.add("--shared-expert", &setup.moe.shared_expert,
           "an expert that every token visits");
  line.add("--gate-shared-expert", &setup.moe.gate_shared_expert,
           "--shared-expert: weighed by a gate of its own");
  line.add({"--expert-copies", may_differ::kFirstWeights},
           &setup.moe.are_copies, "experts begin as copies of one");
  line.add({"--naive", may_differ::kSums}, &setup.moe.is_naive,
           "dispatch by a product with a mask, not by index");
  line.add("--aux-coefficient", &setup.moe.aux_coefficient,
           "of the load-balancing loss");
  line.add("--z-coefficient", &setup.moe.z_coefficient, "of the z-loss");
  line.refuse("--load-svg",
              "./shardbook run moe draws the load of each expert in "
              "build/report.html");
  line.after_parse([&setup, &gate, names] {
    setup.moe.num_experts =
        read_counts("--num-experts", names->num_experts,
                    "give numbers of experts such as 8 or 4,8");
    gate.num_experts = setup.moe.num_experts.back();
    gate.noise = noise_of(names->noise);
    gate.drop_policy = names->drop_policy == "probs" ? DropPolicy::kProbs
                                                     : DropPolicy::kPosition;
  });
}

void take_experts(const CommandLine& line, const ModelOptions& options,
                  MoeOptions& moe) {
  const ModelConfig config = model_config(options);
  if (!config.is_llama()) return;
  const LlamaConfig& llama = config.llama;
  SB_CHECK(llama.num_experts > 0, "--model ", options.model,
           ": has no experts; give a Mixtral, a Qwen3-MoE or a GPT, whose MLPs "
           "experts replace");
  for (const char* flag : {"--num-experts",
                           "--top-k",
                           "--capacity-factor",
                           "--min-capacity",
                           "--drop-tokens",
                           "--no-drop-tokens",
                           "--use-rts",
                           "--no-use-rts",
                           "--noise",
                           "--second-expert-sampling",
                           "--no-second-expert-sampling",
                           "--drop-policy",
                           "--residual",
                           "--shared-expert",
                           "--gate-shared-expert",
                           "--expert-copies",
                           "--naive",
                           "--expert-tp",
                           "--aux-coefficient",
                           "--z-coefficient",
                           "--no-dropless"}) {
    SB_CHECK(!line.has(flag), flag, ": the config of --model ", options.model,
             " decides about experts: ", llama.num_experts,
             ", of which a token visits ", llama.experts_per_token,
             ", without capacity; leave this option out");
  }
  moe.gate.num_experts = llama.num_experts;
  moe.gate.k = llama.experts_per_token;
  moe.num_experts = {static_cast<int>(llama.num_experts)};
  moe.is_dropless = true;
  moe.aux_coefficient = 0;  // in the model's own loss
}

void check_strategy_options(const Options& options,
                            const StrategyOptions& setup) {
  SB_CHECK(setup.zero_stage < 3,
           "--zero-stage 3: experts are not whole on any rank, and stage 3 "
           "would gather them for every micro-batch; give 1 or 2");
  SB_CHECK(!setup.cpu_offload || setup.zero_stage == 2,
           "--cpu-offload: gradients stream to the host as shards; give "
           "--zero-stage 2 as well");
  SB_CHECK(!setup.moe.expert_tensor_parallel || setup.tp > 1,
           "--expert-tp: cuts experts over tensor-parallel ranks; give --tp");
  SB_CHECK(!setup.moe.gate_shared_expert || setup.moe.shared_expert,
           "--gate-shared-expert: weighs the shared expert; give "
           "--shared-expert");
  const ModelConfig config = model_config(options);
  SB_CHECK(!config.is_llama() || setup.tp == 1, "--tp ", setup.tp, ": ",
           options.model, " has whole layers on every rank; give 1");
  SB_CHECK(!config.is_llama() ||
               (setup.moe.is_dropless &&
                config.llama.num_experts == setup.moe.gate.num_experts),
           "--model ", options.model,
           ": a GPT gets experts by options, a Llama those of its config, "
           "which 13_moe spreads");
  const auto counts = static_cast<std::int64_t>(setup.moe.num_experts.size());
  SB_CHECK(config.type != "gpt2" || counts <= config.n_layer,
           "--num-experts: ", counts, " numbers, and ", options.model, " has ",
           config.n_layer, " layers; give at most one per layer");
  SB_CHECK(most_experts(setup.moe) > 1,
           "--num-experts 1: no layer has experts; give 2 or more");
  const std::int64_t groups =
      options.world_size / setup.tp * setup.micro_batches;
  const bool has_slots = !setup.moe.depends_on_routing() && groups > 0 &&
                         options.batch % groups == 0;
  GateOptions gate = setup.moe.gate;
  for (std::int64_t layer = 0; layer < counts; ++layer) {
    gate.num_experts = experts_of_layer(setup.moe, layer);
    if (gate.num_experts == 1) continue;
    check_gate(gate);
    if (has_slots) {
      check_slots(capacity(options.batch / groups * options.seq, gate, true),
                  setup.tp);
    }
  }
}

GroupSizes group_sizes(const Options& options, const StrategyOptions& setup) {
  GroupSizes sizes = {.world = options.world_size,
                      .tp = setup.tp,
                      .ep = setup.ep,
                      .data_before_expert = setup.data_before_expert};
  if (setup.ep > 0) return sizes;
  int ep = std::max(1, options.world_size / setup.tp);
  const auto shrink = [&](std::int64_t experts) {
    if (experts > 1) ep = static_cast<int>(std::gcd<std::int64_t>(ep, experts));
  };
  shrink(setup.moe.gate.num_experts);
  for (const int experts : setup.moe.num_experts) shrink(experts);
  sizes.ep = ep;
  return sizes;
}

}  // namespace shardbook::moe

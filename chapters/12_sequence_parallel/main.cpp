// Sequence and context parallelism: cut the tokens of every sample over ranks.
//
//   ch12_sequence_parallel --world-size 4 --kind ring --layout zigzag
//   ch12_sequence_parallel --world-size 4 --kind ulysses
//   ch12_sequence_parallel --world-size 2 --kind megatron
//   ch12_sequence_parallel --world-size 64 --backend sim --model gpt2 --seq 65536
//
// Read before: 07_tensor_parallel. Read next: 13_moe.

#include <memory>

#include "chapters/12_sequence_parallel/sequence_strategy.h"
#include "chapters/common/run/program.h"
#include "chapters/common/run/training.h"
#include "comm/device_mesh.h"
#include "core/check.h"

using namespace shardbook;

namespace {

struct Names {
  std::string kind = "ring";
  std::string layout = "contiguous";
  sequence_parallel::MegatronOptions megatron;
  bool is_megatron() const { return kind == "megatron"; }
};

/// Refuses options that the kind does not read.
void refuse_unread(const Names& names,
                   const sequence_parallel::StrategyOptions& setup) {
  SB_CHECK(names.layout == "contiguous" || names.kind == "ring", "--layout ",
           names.layout, ": --kind ", names.kind,
           " does not read it; give it with --kind ring");
  SB_CHECK(!setup.sequence.all_reduce || names.kind == "rsa",
           "--rsa-all-reduce: --kind ", names.kind,
           " does not read it; give it with --kind rsa");
  SB_CHECK(!names.megatron.recompute_attention || names.is_megatron(),
           "--recompute-attention: --kind ", names.kind,
           " does not read it; give it with --kind megatron");
}

void add_options(CommandLine& line, Names& names,
                 sequence_parallel::StrategyOptions& setup) {
  line.add("--kind", &names.kind, "how queries meet keys",
           {"ring", "rsa", "ulysses", "megatron"});
  line.add("--layout", &names.layout,
           "which tokens a rank holds (ring attention)",
           {"contiguous", "zigzag", "striped"});
  line.add("--rsa-all-reduce", &setup.sequence.all_reduce,
           "RSA: sum dK and dV by all-reduce, as the original does");
  line.add("--micro-batches", &setup.micro_batches, "micro-batches per step",
           1);
  line.add("--recompute-attention", &names.megatron.recompute_attention,
           "megatron: compute attention again in backward");
  line.after_parse([&] {
    refuse_unread(names, setup);
    if (!names.is_megatron()) {
      setup.sequence.kind = sequence_parallel::kind_of(names.kind);
    }
    setup.sequence.layout = sequence_parallel::layout_of(names.layout);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the shared ones, then this chapter's own.
    Options options;
    options.chapter = "12_sequence_parallel";
    Names names;
    sequence_parallel::StrategyOptions setup;
    CommandLine line(
        "ch12_sequence_parallel",
        "Ring attention, ring self-attention, Ulysses, and Megatron's "
        "sequence parallelism.");
    add_shared_options(line, options);
    add_options(line, names, setup);
    line.parse(argc, argv);
    check_options(options);
    check_micro_batches(options.batch, setup.micro_batches);
    refuse_image_models(options, "images have no sequence of tokens to cut");

    // 2. Start the ranks: threads of this process, processes, or fibers.
    ChapterRun chapter;
    chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
      // 3. Name the axes of the device mesh: one, over the whole world.
      DeviceMesh mesh(world, Topology({"cp"}, {world.size()}));

      // 4. Build the same model from the same seed on every rank.
      // 5. Apply the strategy: layers that take this rank's tokens.
      std::unique_ptr<Strategy> strategy;
      if (names.is_megatron()) {
        strategy = std::make_unique<sequence_parallel::MegatronStrategy>(
            options, names.megatron, setup.micro_batches, mesh.group("cp"));
      } else {
        strategy = std::make_unique<sequence_parallel::SequenceStrategy>(
            options, setup, mesh.group("cp"));
      }

      // 6. Train a few steps on the same data.
      run.train(options, *strategy);
    };
    if (!names.is_megatron()) {
      chapter.fold_class = sequence_parallel::fold_class(setup.sequence);
    }

    // 7. Compare parameters with the single-device run.
    chapter.reference = [&](const Options& options) {
      return train_one_device(options, setup.micro_batches);
    };

    // 8. Report loss, largest difference, bytes sent, memory, step time.
    return run_program(options, line, chapter);
  });
}

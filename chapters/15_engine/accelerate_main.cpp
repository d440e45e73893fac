// Accelerate's loop: a script for one process, and any library.
//
//   accelerate --world-size 4 --gradient-accumulation-steps 2
//   accelerate --world-size 4 --plugin fsdp --sharding-strategy SHARD_GRAD_OP
//   accelerate --world-size 2 --plugin deepspeed --zero-stage 3
//   accelerate --world-size 4 --plugin megatron --tp-degree 2 --pp-degree 2
//
// Needed: main.cpp, the engine by a config.

#include <optional>
#include <string>

#include "chapters/15_engine/accelerate_script.h"
#include "chapters/common/run/exit_status.h"
#include "core/context.h"

using namespace shardbook;

int main(int argc, char** argv) {
  return chapter_main([&] {
    // 1. Read the options: the script's, then the fields of its plugin.
    accelerate::ScriptOptions script;
    CommandLine line("accelerate", "Accelerate's loop, with any library.",
                     "0, the numbers are one process's; 1, they are not");
    accelerate::add_options(line, script);
    line.parse(argc, argv);
    accelerate::check_script(line, script);

    // 2. Start the processes.
    return accelerate::run_script(script, [&](ProcessGroup& world) {
      // 3. Make the objects of a script for one process.
      accelerate::Objects mine = accelerate::make_objects(script);

      // 4. Hand them to the plugin's library.
      accelerate::Accelerator acc(script.accelerator, world);
      auto [model, optimizer, loader, scheduler] = acc.prepare(
          *mine.loaded.model, mine.optimizer, mine.loader, mine.scheduler);
      accelerate::PreparedLoader eval_loader = acc.prepare(mine.eval_loader);
      const std::string& from = script.resume_from_checkpoint;
      if (!from.empty()) acc.load_state(from);
      begin_run();

      // 5. Train
      accelerate::History history;
      std::int64_t updates = accelerate::updates_done(script, loader);
      history.first_update = updates;
      double window = 0, norm = 0;
      while (updates < script.max_train_steps) {
        const std::optional<Batch> batch = loader.next();
        if (!batch) continue;  // the next epoch begins
        const double rate = scheduler.get_last_lr();

        // The loop for one process
        const auto micro_step = acc.accumulate(model);
        const Tensor loss = model.loss(*batch);
        acc.backward(loss);
        if (acc.sync_gradients()) {
          norm = *acc.clip_grad_norm_(model.parameters(), script.max_grad_norm);
        }
        optimizer.step();
        scheduler.step();
        optimizer.zero_grad();

        // Report and save at the end of a window
        window += acc.reduce(loss, "mean").item();
        if (!acc.sync_gradients()) continue;
        history.add_update(script, acc, window, norm, rate,
                           optimizer.step_was_skipped());
        window = 0;
        updates += 1;
        const std::string to = accelerate::checkpoint_of(script, updates);
        if (!to.empty()) acc.save_state(to);
      }

      // 6. Evaluate: each sample counts once
      const NoGrad no_grad;
      while (const std::optional<Batch> batch = eval_loader.next()) {
        const Tensor losses =
            accelerate::loss_by_sample(model.loss(*batch), *batch);
        history.add_evaluated(acc.gather_for_metrics(losses));
      }
      history.finish(acc, acc.get_state_dict(model));
      return history;
    });
  });
}

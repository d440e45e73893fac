// Two runs with one folder of checkpoints: one of them keeps its own, the other
// is refused, in whatever order they come.

#include "chapters/common/run/checkpoints.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "chapters/00_single_device/single_device.h"
#include "chapters/common/run/exit_status.h"
#include "comm/launch.h"
#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

class TwoRuns : public testing::Test {
 protected:
  /// The options of a run, after its first look into the folder.
  Options look(std::int64_t steps, bool resume = false) const {
    Options options;
    options.model =
        R"({"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 8})";
    options.data = "walk";
    options.batch = 2;
    options.seq = 4;
    options.steps = steps;
    options.checkpoint = folder_.path();
    options.resume = resume;
    return at_checkpoint(options);
  }

  /// The rest of that run.
  static void go_on(const Options& options) {
    single_device::SingleDevice device(options, {});
    Checkpoints checkpoints(options, device, /*world=*/nullptr);
    checkpoints.load();
    train(
        options, device.optimizer(), /*is_main=*/true,
        [&](std::int64_t step) { return device.step(step); }, &checkpoints);
  }

  static void expect_refused(const Options& options,
                             const std::vector<std::string>& parts) {
    try {
      go_on(options);
      ADD_FAILURE() << "not refused";
    } catch (const BadCheckpoint& error) {
      expect_text(error.what(), parts);
    }
  }

  /// Everything in the folder, apart from the lock.
  Names names() const {
    Names all;
    for (const auto& entry : fs::directory_iterator(folder_.path())) {
      all.insert(entry.path().filename().string());
    }
    all.erase(".lock");
    return all;
  }

  TempFolder folder_;
};

TEST_F(TwoRuns, TheSecondNewOneIsRefused) {
  const Options first = look(2), second = look(1);
  go_on(first);
  expect_refused(second, {"another run has written step-00000002", "--resume"});
  EXPECT_EQ(names(), Names{"step-00000002"});
}

TEST_F(TwoRuns, AResumedOneIsRefusedWhereTheOtherWasFaster) {
  go_on(look(1));
  const Options first = look(3, /*resume=*/true);
  const Options second = look(2, /*resume=*/true);
  go_on(first);
  expect_refused(second, {"another run has written step-00000003"});
  EXPECT_EQ(names(), (Names{"step-00000001", "step-00000003"}));
}

TEST_F(TwoRuns, AResumedOneIsRefusedWhereItsCheckpointIsGone) {
  go_on(look(1));
  const Options second = look(2, /*resume=*/true);
  fs::remove_all(folder_ / "step-00000001");
  expect_refused(second, {"step-00000001 is gone"});
}

// The name is the same, the run is another.
TEST_F(TwoRuns, AResumedOneIsRefusedWhereAnotherRunHasReplacedItsCheckpoint) {
  go_on(look(1));
  const Options second = look(2, /*resume=*/true);
  fs::remove_all(folder_ / "step-00000001");
  Options other = look(1);
  other.seed = 7;
  go_on(other);
  expect_refused(second, {"is of another run: --seed 7 there, 0 here"});
}

// As on a file system without locks.
TEST_F(TwoRuns, WithoutALockTheSecondToWriteIsRefused) {
  const Options options = look(2);
  single_device::SingleDevice a(options, {}), b(options, {});
  Checkpoints first(options, a, /*world=*/nullptr);
  fs::remove(folder_ / ".lock");
  Checkpoints second(options, b, /*world=*/nullptr);
  const auto keep = [](single_device::SingleDevice& device,
                       Checkpoints& checkpoints, std::int64_t step) {
    device.step(0);
    checkpoints.after_step(step, /*skipped_steps=*/0, /*is_last=*/true,
                           /*is_finite=*/true);
  };
  keep(a, first, 2);
  try {
    keep(b, second, 1);
    ADD_FAILURE() << "not refused";
  } catch (const RunError& error) {
    expect_text(error.what(), {"not kept after step 1", "holds step-00000002"});
  }
  keep(a, first, 3);
  EXPECT_EQ(names(), (Names{"step-00000002", "step-00000003"}));
}

}  // namespace
}  // namespace shardbook

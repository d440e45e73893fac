// The virtual timeline does not depend on which device's thread comes first.

#include <gtest/gtest.h>

#include <chrono>
#include <sstream>
#include <string>
#include <thread>

#include "chapters/01_data_parallel/data_parallel_strategy.h"
#include "sim/virtual_clock.h"
#include "tests/chapters/01_data_parallel/data_parallel_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::data_parallel {
namespace {

using namespace test;

/// Delays the threads of one device, so the others' threads come first.
class Laggard : public Observer {
 public:
  explicit Laggard(Device slow) : slow_(std::move(slow)) {}
  void on_op_begin(const OpEvent& event) override {
    if (event.device == slow_) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

 private:
  Device slow_;
};

/// The clock's record of two steps on three devices.
std::string timeline(int slow) {
  // Real launches take time: they show the order in which work is issued.
  const sim::CostModel model(sim::Cluster::read("dgx-a100"));
  World world(3);
  const auto laggard =
      std::make_shared<Laggard>(world.devices[static_cast<std::size_t>(slow)]);
  world.context.add_observer(laggard);
  std::ostringstream text;
  text.precision(17);
  {
    sim::ClockScope scope(model, 0, true);
    for (int i = 1; i < 3; ++i) {
      scope.clock().add_device(world.devices[static_cast<std::size_t>(i)], i);
    }
    Options options = tiny_options(3, 6);
    options.model =
        R"({"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 8})";
    options.dropout = 0.1;
    DataParallelStrategy strategy(options, world.devices);
    scope.clock().begin_steps();
    for (int step = 0; step < 2; ++step) {
      strategy.step(step);
      scope.clock().end_step();
    }
    for (const auto& device : scope.clock().devices()) {
      for (const sim::TimelineEvent& event : device->timeline().events) {
        text << device->rank() << " " << event.name << " " << event.category
             << " " << event.queue << " " << event.begin_s << " " << event.end_s
             << "\n";
      }
      for (const sim::MemorySample& sample : device->timeline().memory) {
        text << device->rank() << " " << sample.time_s << " " << sample.total()
             << "\n";
      }
      for (const double step : device->timeline().steps) text << step << "\n";
    }
  }
  world.context.remove_observer(laggard);
  return text.str();
}

// The token embedding is used twice, so each replica sends two gradients of it.
TEST(DataParallelTimeline, IsTheSameWhicheverThreadComesFirst) {
  const std::string expected = timeline(0);
  const int runs = kSanitized ? 4 : 12;
  for (int run = 1; run < runs; ++run) {
    EXPECT_TRUE(timeline(run % 3) == expected)
        << "run " << run << ": device " << run % 3 << " was the last";
  }
}

}  // namespace
}  // namespace shardbook::data_parallel

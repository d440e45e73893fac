#include "core/backward_end.h"

#include <memory>
#include <utility>

#include "core/autograd.h"

namespace shardbook::autograd {
namespace {

/// Belongs to the backward, which drops it unused when an exception leaves it.
class Outcome {
 public:
  Outcome(std::function<void()> ended, std::function<void()> failed)
      : ended_(std::move(ended)), failed_(std::move(failed)) {}
  ~Outcome() {
    if (failed_) failed_();
  }
  Outcome(const Outcome&) = delete;
  Outcome& operator=(const Outcome&) = delete;

  void end() {
    ended_();
    failed_ = nullptr;
  }

 private:
  std::function<void()> ended_, failed_;
};

}  // namespace

void on_end_of_backward(std::function<void()> ended,
                        std::function<void()> failed) {
  const auto outcome =
      std::make_shared<Outcome>(std::move(ended), std::move(failed));
  at_end_of_backward([outcome] { outcome->end(); });
}

}  // namespace shardbook::autograd

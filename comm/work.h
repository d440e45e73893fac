#pragma once

// A communication call in flight.

#include <functional>
#include <memory>
#include <utility>

namespace shardbook {

/// Handle to one call. A default-constructed Work is already complete.
/// Destroying the handle does not cancel the call, and buffers must stay alive
/// and untouched until it is complete. A call whose handle nobody keeps cannot be
/// waited for.
class [[nodiscard]] Work {
 public:
  /// How a backend waits; `wait` throws the cause of a failure.
  class State {
   public:
    virtual ~State() = default;
    virtual void wait() = 0;
    virtual bool done() = 0;
  };

  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  Work(std::function<void()> wait, std::function<bool()> done)
      : state_(std::make_shared<Functions>(std::move(wait), std::move(done))) {}

  /// Returns when the caller may use the buffers. Throws Error when a peer
  /// failed, calls did not match, or the group's timeout passed.
  void wait() {
    if (state_ != nullptr) state_->wait();
    state_.reset();
  }
  bool done() const { return state_ == nullptr || state_->done(); }

 private:
  struct Functions : State {
    Functions(std::function<void()> wait, std::function<bool()> done)
        : wait_(std::move(wait)), done_(std::move(done)) {}
    void wait() override { wait_(); }
    bool done() override { return done_(); }
    std::function<void()> wait_;
    std::function<bool()> done_;
  };
  std::shared_ptr<State> state_;
};

}  // namespace shardbook

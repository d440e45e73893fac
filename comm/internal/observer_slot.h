#pragma once

// The observer of a group and of all groups made from it.

#include <memory>
#include <mutex>

#include "comm/process_group.h"

namespace shardbook::internal {

/// One place for all of them, so clearing it once clears it everywhere. Threads
/// of a rank may issue calls while another one changes the observer.
class ObserverSlot {
 public:
  void set(std::shared_ptr<CommObserver> observer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    observer_.swap(observer);
  }
  std::shared_ptr<CommObserver> get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return observer_;
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<CommObserver> observer_;
};

}  // namespace shardbook::internal

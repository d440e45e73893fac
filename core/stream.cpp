#include "core/stream.h"

#include <exception>

#include "core/check.h"
#include "core/internal/event_point.h"

namespace shardbook {
namespace {

void rethrow(const std::exception_ptr& error) {
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace

void Event::record() {
  point_ = internal::make_event_point(RankContext::current().device);
  point_->record(nullptr);
}

void Event::wait() const {
  if (point_ != nullptr) rethrow(point_->wait());
}

void Event::synchronize() const {
  if (point_ != nullptr) rethrow(point_->synchronize());
}

bool Event::query() const { return point_ == nullptr || point_->has_passed(); }

double Event::elapsed_s(const Event& earlier) const {
  SB_CHECK(point_ != nullptr && earlier.point_ != nullptr && query() &&
               earlier.query(),
           "Event: time elapses between two events that were recorded and have "
           "passed; synchronize with both first");
  return point_->seconds_since(*earlier.point_);
}

}  // namespace shardbook

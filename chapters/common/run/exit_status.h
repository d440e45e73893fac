#pragma once

// How programs end: what is thrown becomes one sentence on stderr and an exit
// status.

#include <functional>

#include "comm/launch.h"
#include "core/check.h"

namespace shardbook {

// The exit status of a program. 0: every claim holds. kExitBadInput (2) and
// kExitRunFailed (3: a rank was lost or late, a disk is full, ...) are in
// comm/launch.h. 128 + n: signal n ended it.
constexpr int kExitClaimFailed = 1;

/// Call it when the options are good: from here on an Error is a failure of the
/// run (kExitRunFailed) and not of its options (kExitBadInput).
void begin_run();

/// A checkpoint that does not fit the run, or a run that cannot be saved in
/// one: a mistake in the options, although found only after the ranks start.
class BadCheckpoint : public Error {
 public:
  using Error::Error;
};

/// Thrown by `train` after a signal.
class Interrupted : public Error {
 public:
  using Error::Error;
};
/// True once SIGINT, SIGTERM or SIGHUP has come, from chapter_main on.
bool interrupted();

/// Runs `body` and turns what it throws into a sentence and an exit status.
/// Watches the signals (comm/signals.h).
int chapter_main(const std::function<int()>& body);

}  // namespace shardbook

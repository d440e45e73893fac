#pragma once

// Ranks of the stand-in that are processes: they meet in a folder.
//
// SHARDBOOK_STAND_IN_FOLDER names it. A rank writes what it brings to a call
// into a file, and a call is complete when the files of all its ranks are there.
// Each rank then computes its own result, from all files. Nothing is removed, so
// a test can read afterwards who called what:
//
//   COMMUNICATOR.join.RANK                   "DEVICE of SIZE"
//   COMMUNICATOR.call.NUMBER.RANK            a collective: its text, its input
//   COMMUNICATOR.message.FROM.TO.NUMBER      a message, and with .taken its end
//   COMMUNICATOR.split.NUMBER.RANK           "COLOR KEY"
//   COMMUNICATOR.end.RANK

#include <string>

#include "tests/cuda/stand_in/communicator.h"

namespace stand_in {

/// The folder; empty where all ranks are threads of this process.
const std::string& meeting_folder();

/// Of the communicator `clique`, as rank `rank`.
void write_join(const Clique& clique, int rank, int device);
void write_end(const Clique& clique, int rank);
/// Whether all ranks have written it. Two ranks on one device are an `error`.
bool all_have_joined(const Clique& clique, std::string& error);
bool all_have_ended(const Clique& clique);

/// One look at an operation that is first on its stream: brings this rank's
/// part, and computes the result when all parts are there. Returns what differs
/// between ranks, or nothing.
std::string look_at(const Clique& clique, int rank, Operation& operation);

/// The part of a split that this rank belongs to.
struct SplitPart {
  std::string id;
  int rank = -1, size = 0;  ///< -1: of no part
};
void write_split(const Clique& clique, int rank, std::int64_t number, int color,
                 int key);
/// Whether all ranks have called it; then `part` is this rank's.
bool find_part(const Clique& clique, int rank, std::int64_t number,
               SplitPart& part);

}  // namespace stand_in

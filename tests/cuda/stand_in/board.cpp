#include "tests/cuda/stand_in/board.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>

#include "tests/cuda/emulator/emulator.h"

namespace stand_in {
namespace {

// Empty where all ranks are threads of this process.
const std::string& folder() {
  static const std::string result = [] {
    const char* given = std::getenv("SHARDBOOK_STAND_IN_FOLDER");
    return std::string(given == nullptr ? "" : given);
  }();
  return result;
}

std::map<std::string, std::string>& board() {
  static auto& all = *new std::map<std::string, std::string>;
  return all;
}

std::string name_of(const ncclComm& comm, const std::string& what, int rank) {
  return comm.id + "." + what + "." + std::to_string(rank);
}

void write(const std::string& name, const std::string& text) {
  if (!are_processes()) {
    board()[name] = text;
    return emulator::wake_from_poll();
  }
  // Whole or not at all: others look for the file.
  const std::string path = folder() + "/" + name,
                    unfinished = path + ".unfinished";
  std::ofstream(unfinished, std::ios::binary) << text;
  std::filesystem::rename(unfinished, path);
}

bool exists(const std::string& name) {
  return are_processes() ? std::filesystem::exists(folder() + "/" + name)
                         : board().count(name) > 0;
}

std::string read(const std::string& name) {
  if (!are_processes()) return board().at(name);
  std::ifstream in(folder() + "/" + name, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// What all ranks have written under this name, once they have.
std::optional<std::vector<std::string>> read_all(const ncclComm& comm,
                                                 const std::string& what) {
  for (int rank = 0; rank < comm.size; ++rank) {
    if (!exists(name_of(comm, what, rank))) return {};
  }
  std::vector<std::string> result;
  for (int rank = 0; rank < comm.size; ++rank) {
    result.push_back(read(name_of(comm, what, rank)));
  }
  return result;
}

// A line that must be the same on all ranks, then the data.
std::string with_data(const std::string& line, const void* data,
                      std::size_t bytes) {
  return line + "\n" + std::string(static_cast<const char*>(data), bytes);
}

std::string difference(const std::string& mine, int rank,
                       const std::string& theirs, int other) {
  if (mine == theirs) return "";
  const std::string here = "rank " + std::to_string(rank) + " called " + mine,
                    there =
                        "rank " + std::to_string(other) + " called " + theirs;
  return rank < other ? here + ", " + there : there + ", " + here;
}

std::string look_at_message(const ncclComm& comm, Operation& operation) {
  const bool sends = operation.kind == Kind::kSend;
  const int from = sends ? comm.rank : operation.peer;
  const int to = sends ? operation.peer : comm.rank;
  const std::string name = comm.id + ".message." + std::to_string(from) + "." +
                           std::to_string(to) + "." +
                           std::to_string(operation.number);
  const std::string taken = name + ".taken";
  const std::size_t bytes = operation.count * size_of(operation.type);
  // Without the name of the call, which the two ends do not share.
  const std::string text = operation.text();
  const std::string line = text.substr(text.find(' ') + 1);
  if (sends) {
    if (!std::exchange(operation.has_arrived, true)) {
      write(name, with_data(line, operation.input, bytes));
    }
    operation.is_done = exists(taken);
    return "";
  }
  if (!exists(name)) return "";
  const std::string found = read(name);
  const std::string theirs = found.substr(0, found.find('\n'));
  if (theirs != line) {
    return difference(text, comm.rank, "ncclSend " + theirs, operation.peer);
  }
  std::memcpy(operation.output, found.data() + line.size() + 1, bytes);
  write(taken, "");
  operation.is_done = true;
  return "";
}

}  // namespace

// Never destroyed: streams may be waited for while the process ends.
State& state() {
  static State& result = *new State;
  return result;
}

bool are_processes() { return !folder().empty(); }

void write_join(const ncclComm& comm) {
  write(name_of(comm, "join", comm.rank),
        std::to_string(comm.device) + " of " + std::to_string(comm.size));
}

void write_end(const ncclComm& comm) {
  write(name_of(comm, "end", comm.rank), "");
}

void write_split(const ncclComm& comm, int color, int key) {
  write(name_of(comm, "split." + std::to_string(comm.num_splits), comm.rank),
        std::to_string(color) + " " + std::to_string(key));
}

bool all_have_joined(ncclComm& comm) {
  const auto devices = read_all(comm, "join");
  if (!devices) return false;
  std::map<std::string, std::size_t> owners;
  for (std::size_t rank = 0; rank < devices->size(); ++rank) {
    const auto [owner, is_new] = owners.emplace((*devices)[rank], rank);
    if (is_new) continue;
    comm.error = ncclInvalidUsage;
    comm.error_text = "duplicate GPU: rank " + std::to_string(owner->second) +
                      " and rank " + std::to_string(rank) + " both on device " +
                      owner->first;
  }
  return true;
}

bool all_have_ended(const ncclComm& comm) {
  return read_all(comm, "end").has_value();
}

bool find_part(const ncclComm& comm, std::string& id, int& rank, int& size) {
  const std::string what = "split." + std::to_string(comm.num_splits - 1);
  const auto all = read_all(comm, what);
  if (!all) return false;
  std::map<std::pair<int, int>, int> members;  // (key, rank): color
  int mine = -1;
  for (int r = 0; r < comm.size; ++r) {
    std::istringstream in((*all)[static_cast<std::size_t>(r)]);
    int color = 0, key = 0;
    in >> color >> key;
    members[{key, r}] = color;
    if (r == comm.rank) mine = color;
  }
  // Not a name of the parent's, which may be forgotten first
  id = comm.id + "+" + what + "." + std::to_string(mine);
  rank = -1, size = 0;
  for (const auto& [order, color] : members) {
    if (mine < 0 || color != mine) continue;
    if (order.second == comm.rank) rank = size;
    ++size;
  }
  return true;
}

std::string look_at(const ncclComm& comm, Operation& operation) {
  if (operation.is_message()) return look_at_message(comm, operation);
  const std::string what = "call." + std::to_string(operation.number);
  const std::string line = operation.text();
  const auto size = static_cast<std::size_t>(comm.size);
  const bool is_scatter = operation.kind == Kind::kReduceScatter;
  const bool is_gather = operation.kind == Kind::kAllGather;
  const std::size_t bytes = operation.count * size_of(operation.type);
  if (!std::exchange(operation.has_arrived, true)) {
    write(name_of(comm, what, comm.rank),
          with_data(line, operation.input, bytes * (is_scatter ? size : 1)));
  }
  const auto parts = read_all(comm, what);
  if (!parts) return "";
  // The others' results go nowhere.
  std::vector<std::vector<char>> nowhere(
      size, std::vector<char>(bytes * (is_gather ? size : 1)));
  std::vector<Operation> all(size, operation);
  std::vector<Operation*> by_rank;
  for (std::size_t r = 0; r < size; ++r) {
    const std::string& part = (*parts)[r];
    const std::string wrong = difference(
        line, comm.rank, part.substr(0, part.find('\n')), static_cast<int>(r));
    if (!wrong.empty()) return wrong;
    all[r].input = part.data() + line.size() + 1;
    if (static_cast<int>(r) != comm.rank) all[r].output = nowhere[r].data();
    by_rank.push_back(&all[r]);
  }
  run_collective(by_rank);
  operation.is_done = true;
  return "";
}

void forget(const std::string& id) {
  auto& all = board();
  all.erase(all.lower_bound(id + "."), all.lower_bound(id + "/"));
}

}  // namespace stand_in

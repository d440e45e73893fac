#include "tests/cuda/stand_in/processes.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>

namespace stand_in {
namespace {

std::string path(const Clique& clique, const std::string& name) {
  return meeting_folder() + "/" + clique.id + "." + name;
}

std::string path(const Clique& clique, const std::string& name, int rank) {
  return path(clique, name + "." + std::to_string(rank));
}

// Whole or not at all: others look for the file.
void write(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".unfinished";
  std::ofstream(unfinished, std::ios::binary) << text;
  std::filesystem::rename(unfinished, path);
}

std::optional<std::string> read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return {};
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// What all ranks have written under this name, once they have.
std::optional<std::vector<std::string>> read_all(const Clique& clique,
                                                 const std::string& name) {
  std::vector<std::string> result;
  for (int rank = 0; rank < clique.size; ++rank) {
    const auto text = read(path(clique, name, rank));
    if (!text) return {};
    result.push_back(*text);
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
  return mine == theirs
             ? ""
             : "rank " + std::to_string(other) + " called " + theirs +
                   ", rank " + std::to_string(rank) + " called " + mine;
}

std::string look_at_message(const Clique& clique, int rank,
                            Operation& operation) {
  const bool sends = operation.kind == Kind::kSend;
  const std::string way =
      sends ? std::to_string(rank) + "." + std::to_string(operation.peer)
            : std::to_string(operation.peer) + "." + std::to_string(rank);
  const std::string file =
      path(clique, "message." + way + "." + std::to_string(operation.number));
  const std::string taken = file + ".taken";
  const std::size_t bytes = operation.count * size_of(operation.type);
  // Without the name of the call, which the two ends do not share.
  const std::string text = operation.text();
  const std::string line = text.substr(text.find(' ') + 1);
  if (sends) {
    if (!std::exchange(operation.has_arrived, true)) {
      write(file, with_data(line, operation.input, bytes));
    }
    operation.is_done = std::filesystem::exists(taken);
    return "";
  }
  const auto found = read(file);
  if (!found) return "";
  const std::string theirs = found->substr(0, found->find('\n'));
  if (theirs != line) {
    return difference(text, rank, "ncclSend " + theirs, operation.peer);
  }
  std::memcpy(operation.output, found->data() + line.size() + 1, bytes);
  write(taken, "");
  operation.is_done = true;
  return "";
}

}  // namespace

const std::string& meeting_folder() {
  static const std::string folder = [] {
    const char* given = std::getenv("SHARDBOOK_STAND_IN_FOLDER");
    return std::string(given == nullptr ? "" : given);
  }();
  return folder;
}

void write_join(const Clique& clique, int rank, int device) {
  write(path(clique, "join", rank),
        std::to_string(device) + " of " + std::to_string(clique.size));
}

void write_end(const Clique& clique, int rank) {
  write(path(clique, "end", rank), "");
}

bool all_have_joined(const Clique& clique, std::string& error) {
  const auto devices = read_all(clique, "join");
  if (!devices) return false;
  std::map<std::string, std::size_t> owners;
  for (std::size_t rank = 0; rank < devices->size(); ++rank) {
    const auto [owner, is_new] = owners.emplace((*devices)[rank], rank);
    if (is_new) continue;
    error = "duplicate GPU: rank " + std::to_string(owner->second) +
            " and rank " + std::to_string(rank) + " both on device " +
            owner->first;
  }
  return true;
}

bool all_have_ended(const Clique& clique) {
  return read_all(clique, "end").has_value();
}

std::string look_at(const Clique& clique, int rank, Operation& operation) {
  if (operation.is_message()) return look_at_message(clique, rank, operation);
  const std::string name = "call." + std::to_string(operation.number);
  const std::string line = operation.text();
  const auto count = operation.count;
  const auto size = static_cast<std::size_t>(clique.size);
  const bool is_scatter = operation.kind == Kind::kReduceScatter;
  const bool is_gather = operation.kind == Kind::kAllGather;
  const std::size_t bytes = count * size_of(operation.type);
  if (!std::exchange(operation.has_arrived, true)) {
    write(path(clique, name, rank),
          with_data(line, operation.input, bytes * (is_scatter ? size : 1)));
  }
  const auto parts = read_all(clique, name);
  if (!parts) return "";
  // The others' results go nowhere.
  std::vector<std::vector<char>> nowhere(
      size, std::vector<char>(bytes * (is_gather ? size : 1)));
  std::vector<Operation> all(size, operation);
  std::vector<Operation*> by_rank;
  for (std::size_t r = 0; r < size; ++r) {
    const std::string& part = (*parts)[r];
    const std::string wrong = difference(
        line, rank, part.substr(0, part.find('\n')), static_cast<int>(r));
    if (!wrong.empty()) return wrong;
    all[r].input = part.data() + line.size() + 1;
    if (static_cast<int>(r) != rank) all[r].output = nowhere[r].data();
    by_rank.push_back(&all[r]);
  }
  run_collective(by_rank);
  operation.is_done = true;
  return "";
}

void write_split(const Clique& clique, int rank, std::int64_t number, int color,
                 int key) {
  write(path(clique, "split." + std::to_string(number), rank),
        std::to_string(color) + " " + std::to_string(key));
}

bool find_part(const Clique& clique, int rank, std::int64_t number,
               SplitPart& part) {
  const std::string name = "split." + std::to_string(number);
  const auto all = read_all(clique, name);
  if (!all) return false;
  std::map<std::pair<int, int>, int> members;  // (key, rank): color
  int mine = -1;
  for (int r = 0; r < clique.size; ++r) {
    std::istringstream in((*all)[static_cast<std::size_t>(r)]);
    int color = 0, key = 0;
    in >> color >> key;
    members[{key, r}] = color;
    if (r == rank) mine = color;
  }
  part = {clique.id + "." + name + "." + std::to_string(mine), -1, 0};
  for (const auto& [order, color] : members) {
    if (mine < 0 || color != mine) continue;
    if (order.second == rank) part.rank = part.size;
    ++part.size;
  }
  return true;
}

}  // namespace stand_in

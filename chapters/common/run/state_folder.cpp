#include "chapters/common/run/state_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <vector>

#include "chapters/common/run/state_files.h"

namespace shardbook {
namespace {

namespace fs = std::filesystem;
using Texts = std::map<std::string, std::string>;

constexpr char kFormat[] = "shardbook checkpoint 2";
constexpr char kOlder[] =
    " is a checkpoint of an older version of the book, which this one does not "
    "read; finish that run with the version that began it";

[[noreturn]] void fail(const std::string& path, const char* step) {
  SB_FAIL(path, ": cannot ", step, ": ", std::strerror(errno));
}

void sync_folder(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY);
  if (descriptor < 0) fail(folder, "open the folder");
  const int failed = ::fsync(descriptor);
  ::close(descriptor);
  // Some file systems have nothing to sync in a folder and say so
  if (failed != 0 && errno != EINVAL && errno != ENOTSUP) {
    fail(folder, "sync the folder");
  }
}

void write_synced(const std::string& path, const std::string& text) {
  const int descriptor =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) fail(path, "create the file");
  // Near the end of the disk, the first write may take a part.
  std::size_t done = 0;
  ssize_t count = 1;
  while (done < text.size() && count > 0) {
    count = ::write(descriptor, text.data() + done, text.size() - done);
    if (count > 0) done += static_cast<std::size_t>(count);
  }
  const bool is_synced = done == text.size() && ::fsync(descriptor) == 0;
  const int cause = errno;
  ::close(descriptor);
  errno = cause;
  if (!is_synced) fail(path, "write the file");
}

/// "groups of tokens 4 there, 2 here; ..."; empty where the two are equal.
std::string differences(const Texts& there, const Texts& here) {
  std::set<std::string> keys;
  for (const auto& [key, value] : there) keys.insert(key);
  for (const auto& [key, value] : here) keys.insert(key);
  const auto value_in = [](const Texts& texts, const std::string& key) {
    const auto found = texts.find(key);
    return found == texts.end() ? std::string("not set") : found->second;
  };
  std::string text;
  for (const std::string& key : keys) {
    const std::string a = value_in(there, key), b = value_in(here, key);
    if (a == b) continue;
    text +=
        (text.empty() ? "" : "; ") + key + " " + a + " there, " + b + " here";
  }
  return text;
}

/// Every parameter that was kept has its place on some rank.
void check_names(const std::string& folder,
                 const std::vector<std::string>& kept,
                 const TrainingState& state, ProcessGroup* world) {
  std::string mine;
  for (const StatePart& part : state.parts) mine += part.name + "\n";
  std::vector<std::string> all = {mine};
  if (world != nullptr) all = world->exchange(mine);
  std::set<std::string> names;
  for (const std::string& text : all) {
    std::istringstream lines(text);
    for (std::string name; std::getline(lines, name);) names.insert(name);
  }
  for (const std::string& name : kept) {
    SB_CHECK(names.count(name) > 0, folder, ": holds '", name,
             "', which this run's model has not");
  }
}

}  // namespace

Manifest read_manifest(const std::string& folder,
                       const std::vector<std::string>& needed) {
  const std::string path = folder + "/manifest.json";
  SB_CHECK(!fs::exists(folder + "/engine.json"), folder, kOlder);
  std::ifstream file(path);
  SB_CHECK(file, path, ": cannot be read; ", folder, " is no whole checkpoint");
  std::stringstream text;
  text << file.rdbuf();
  Manifest manifest;
  std::string format;
  try {
    const auto json = nlohmann::json::parse(text.str());
    json.at("format").get_to(format);
    if (format == kFormat) {
      json.at("ranks").get_to(manifest.ranks);
      json.at("run").get_to(manifest.run);
      if (json.contains("otherwise")) {
        json.at("otherwise").get_to(manifest.otherwise);
      }
      json.at("agreed").get_to(manifest.agreed);
      // Older checkpoints have an option among them
      const auto loss = manifest.agreed.extract("--loss");
      if (!loss.empty()) manifest.run.insert({loss.key(), loss.mapped()});
      json.at("numbers").get_to(manifest.numbers);
      json.at("progress").get_to(manifest.progress);
    }
  } catch (const nlohmann::json::exception&) {
    format = "";
  }
  SB_CHECK(format != "shardbook checkpoint 1", folder, kOlder);
  SB_CHECK(
      format == kFormat && manifest.ranks >= 1 && manifest.ranks <= 1 << 20,
      path, ": is damaged or of another program");
  for (const std::string& name : needed) {
    SB_CHECK(manifest.progress.count(name) > 0, path, ": keeps no ", name);
  }
  return manifest;
}

void on_all_ranks(ProcessGroup* world, const std::function<void()>& work) {
  std::string mine;
  try {
    work();
  } catch (const std::exception& error) {
    mine = error.what();
  }
  std::vector<std::string> all = {mine};
  if (world != nullptr) all = world->exchange(mine);
  for (const std::string& text : all) {
    if (!text.empty()) throw StateError(text);
  }
}

void write_state_folder(const std::string& folder, const std::string& name,
                        const TrainingState& state, Manifest manifest,
                        ProcessGroup* world) {
  const std::string temporary = folder + "/." + name + ".tmp";
  const bool is_main = world == nullptr || world->rank() == 0;
  manifest.ranks = world == nullptr ? 1 : world->size();
  try {
    on_all_ranks(world, [&] {
      if (!is_main) return;
      fs::remove_all(temporary);
      fs::create_directories(temporary);
    });
    on_all_ranks(world, [&] { write_state_file(temporary, state, world); });
    on_all_ranks(world, [&] {
      if (!is_main) return;
      const nlohmann::ordered_json json = {{"format", kFormat},
                                           {"ranks", manifest.ranks},
                                           {"run", manifest.run},
                                           {"otherwise", manifest.otherwise},
                                           {"agreed", state.agreed},
                                           {"numbers", state.numbers},
                                           {"progress", manifest.progress}};
      write_synced(temporary + "/manifest.json", json.dump(2) + "\n");
      sync_folder(temporary);
      fs::remove_all(folder + "/" + name);
      fs::rename(temporary, folder + "/" + name);
      sync_folder(folder);
    });
  } catch (const StateError&) {
    std::error_code ignored;
    if (is_main) fs::remove_all(temporary, ignored);
    throw;
  }
}

void load_state_folder(const std::string& folder, const Manifest& manifest,
                       const TrainingState& state, bool with_optimizer,
                       ProcessGroup* world) {
  const bool is_on_shapes =
      !state.parts.empty() && state.parts[0].values.is_meta();
  if (is_on_shapes) world = nullptr;
  std::optional<StateFiles> files;
  on_all_ranks(world, [&] {
    const std::string other = differences(manifest.agreed, state.agreed);
    SB_CHECK(other.empty(), folder, " is of another run: ", other);
    for (const auto& [name, value] : manifest.numbers) {
      SB_CHECK(state.numbers.count(name) > 0, folder, ": keeps a ", name,
               ", this run has none");
    }
    for (const auto& [name, value] : state.numbers) {
      SB_CHECK(manifest.numbers.count(name) > 0, folder, ": keeps no ", name,
               ", which this run needs");
    }
    files.emplace(folder, manifest.ranks);
    files->check(state, with_optimizer);
  });
  on_all_ranks(world, [&] {
    if (!is_on_shapes) check_names(folder, files->names(), state, world);
    files->load(state, with_optimizer);
  });
  if (state.loaded) state.loaded(manifest.numbers);
}

void write_whole_file(const std::string& path, const std::string& text) {
  write_synced(path + ".new", text);
  fs::rename(path + ".new", path);
}

}  // namespace shardbook

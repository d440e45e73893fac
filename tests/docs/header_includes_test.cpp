// Each public header includes the parts of the standard library that it uses,
// itself or through a header of the project. The compiler cannot tell: it reads
// the standard library once, for all headers (pch/standard_library.h).

#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "tests/docs/pages.h"

namespace shardbook::docs {
namespace {

namespace fs = std::filesystem;

using Words = std::set<std::string>;
/// The text of a header of the project, by its path from the root.
using Reader = std::function<std::string(const std::string& header)>;

// A name, and the headers of which any one is enough: besides the name's own,
// those whose interface is made of it.
const char kNames[] = R"(
algorithm: find_if any_of clamp copy count fill find max max_element min min_element none_of sort
array: array
atomic: atomic memory_order_acquire memory_order_relaxed memory_order_release
chrono: chrono
cmath: fmod abs ceil exp fabs floor fma log log2 nearbyint pow round sqrt
condition_variable: condition_variable
cstddef string vector deque array map set: size_t
cstddef: byte max_align_t nullptr_t ptrdiff_t
cstdint: int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t
cstdint: intptr_t uintptr_t
cstring: memcmp memcpy memset strlen
deque: deque
exception: current_exception exception exception_ptr rethrow_exception
functional: function hash invoke less
initializer_list: initializer_list
iosfwd ostream iostream: ostream
iostream: cerr cout
iterator: istream_iterator
iterator array map set string vector: begin
limits: numeric_limits
list: list
map: map multimap
memory: enable_shared_from_this make_shared make_unique shared_ptr
memory: static_pointer_cast unique_ptr weak_ptr
mutex: lock_guard mutex unique_lock
numeric: accumulate
optional: nullopt optional
random: mt19937
set: multiset set
sstream: istringstream ostringstream stringstream
stdexcept: runtime_error
fstream: ifstream
string: getline stod string to_string
string_view: string_view
thread: this_thread thread
tuple: apply make_tuple tie tuple tuple_element_t
type_traits: conditional_t decay_t enable_if_t integral_constant
type_traits: is_arithmetic_v is_floating_point_v is_integral_v is_same_v
type_traits: is_trivially_copyable_v is_void_v remove_pointer_t
unordered_map: unordered_map
utility memory functional: forward move
utility map: pair
utility: declval exchange swap
variant: variant
vector: vector
)";

std::map<std::string, Words> headers_of_names() {
  std::map<std::string, Words> headers;
  std::istringstream lines(kNames);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    std::istringstream providers(line.substr(0, colon));
    const Words any{std::istream_iterator<std::string>(providers), {}};
    std::istringstream names(line.substr(colon + 1));
    for (std::string name; names >> name;) headers[name] = any;
  }
  return headers;
}

// A header as this test sees it.
struct Header {
  Words standard, project;  // what it includes, by kind
  std::string code;         // without remarks, strings and includes
};

Header parse(const std::string& text) {
  static const std::regex kInclude(R"re(#include (<|")([^>"]+).*)re");
  // A string, a remark to the end of its line, or one between its marks
  static const std::regex kNoCode(
      R"re("(\\.|[^"\\\n])*"|//.*|/\*([^*]|\*[^/])*\*/)re");
  Header header;
  std::string rest;
  for (const std::string& line : split_lines(text)) {
    std::smatch found;
    if (std::regex_match(line, found, kInclude)) {
      (found[1] == "<" ? header.standard : header.project).insert(found[2]);
    } else {
      rest += line + "\n";
    }
  }
  header.code = std::regex_replace(rest, kNoCode, "");
  return header;
}

bool in_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

/// All headers that one test reads, each once.
class Headers {
 public:
  explicit Headers(Reader read) : read_(std::move(read)) {}

  /// What is wrong with the includes of a header; empty when nothing is.
  std::string missing_includes(const std::string& path) {
    Words seen, included;
    collect(path, &seen, &included);
    const std::string& code = header(path).code;
    Words wrong;
    for (std::size_t at = 0, end = 0; at < code.size(); at = end + 1) {
      for (end = at; end < code.size() && in_name(code[end]);) ++end;
      if (end == at) continue;
      const std::string problem =
          check(code.substr(at, end - at),
                at >= 5 && code.compare(at - 5, 5, "std::") == 0, included);
      if (!problem.empty()) wrong.insert(problem);
    }
    std::string words;
    for (const std::string& one : wrong) {
      words += (words.empty() ? "" : "; ") + one;
    }
    return words;
  }

 private:
  const Header& header(const std::string& path) {
    const auto found = headers_.find(path);
    if (found != headers_.end()) return found->second;
    return headers_[path] = parse(read_(path));
  }

  // Adds what a header includes of the standard library, however far away.
  void collect(const std::string& path, Words* seen, Words* standard) {
    if (!seen->insert(path).second) return;
    const Header& here = header(path);
    standard->insert(here.standard.begin(), here.standard.end());
    for (const std::string& next : here.project) collect(next, seen, standard);
  }

  std::string check(const std::string& name, bool is_std,
                    const Words& included) const {
    const auto found = names_.find(name);
    if (!is_std) {
      const bool is_type =
          name == "size_t" ||
          (found != names_.end() && found->second == Words{"cstdint"});
      return is_type ? name + " needs std:: before it" : "";
    }
    if (found == names_.end()) {
      return "std::" + name + " is not in the list of this test";
    }
    std::string providers;
    for (const std::string& provider : found->second) {
      if (included.count(provider)) return "";
      providers += (providers.empty() ? "<" : " or <") + provider + ">";
    }
    return "std::" + name + " needs #include " + providers;
  }

  const std::map<std::string, Words> names_ = headers_of_names();
  Reader read_;
  std::map<std::string, Header> headers_;
};

TEST(HeaderIncludes, AMissingOneIsNamed) {
  std::map<std::string, std::string> project = {
      {"a.h", "#include <vector>\n#include <cstdint>\n"},
      {"b.h", "#include \"a.h\"\n// std::map\nstd::vector<std::int64_t> x;\n"},
      {"c.h", "#include \"b.h\"\nstd::string s = \"std::map\"; int64_t i;\n"},
      {"d.h", "#include \"d.h\"\nstd::no_such_name n;"}};
  const auto missing_includes = [&](const std::string& path) {
    return Headers([&](const std::string& name) { return project[name]; })
        .missing_includes(path);
  };
  EXPECT_EQ(missing_includes("b.h"), "");
  EXPECT_EQ(missing_includes("c.h"),
            "int64_t needs std:: before it; "
            "std::string needs #include <string>");
  EXPECT_EQ(missing_includes("d.h"),
            "std::no_such_name is not in the list of this test");
  project["a.h"] = "";
  EXPECT_EQ(missing_includes("b.h"),
            "std::int64_t needs #include <cstdint>; "
            "std::vector needs #include <vector>");
}

TEST(HeaderIncludes, EachPublicHeaderHasWhatItUses) {
  Headers read(read_file);
  std::istringstream headers(SHARDBOOK_PUBLIC_HEADERS);
  int checked = 0;
  for (std::string header; headers >> header; ++checked) {
    EXPECT_EQ(read.missing_includes(header), "") << header;
  }
  EXPECT_GT(checked, 0);
}

// --- Rooms -------------------------------------------------------------------

/// Each room may include itself and the rooms above it in this list.
const Lines kRooms = {"core",
                      "comm",
                      "sim",
                      "chapters/common/models",
                      "chapters/common/run",
                      "chapters/common/sharded",
                      "chapters/common/pipeline",
                      "chapters/common",
                      "chapters/pictures",
                      "chapters/0",  // 00 to 15, in reading order
                      "chapters/1",
                      "chapters/programs",
                      "chapters/planner",
                      "chapters/explorer",
                      "chapters/figures",
                      "chapters/table",
                      "chapters/your_own"};

/// The place of a file's room in the list, and its folder where a line of the
/// list stands for several.
std::pair<std::size_t, std::string> room_of(const std::string& path) {
  std::size_t best = 0, length = 0;
  for (std::size_t i = 0; i < kRooms.size(); ++i) {
    const std::string& room = kRooms[i];
    if (path.rfind(room, 0) != 0 || room.size() < length) continue;
    best = i, length = room.size();
  }
  return {best, path.substr(0, path.find('/', length))};
}

TEST(HeaderIncludes, NoArrowRunsUp) {
  const fs::path kProject = SHARDBOOK_ROOT;
  const std::string kInclude = "#include \"";
  std::size_t arrows = 0;
  for (const char* top : {"core", "comm", "sim", "chapters"}) {
    for (const auto& entry : fs::recursive_directory_iterator(kProject / top)) {
      const std::string ending = entry.path().extension().string();
      if (ending != ".h" && ending != ".cpp" && ending != ".cu") continue;
      const std::string file = fs::relative(entry.path(), kProject).string();
      for (const std::string& line : split_lines(read_file(entry.path()))) {
        if (line.rfind(kInclude, 0) != 0) continue;
        const std::size_t begin = kInclude.size();
        const std::string other =
            line.substr(begin, line.find('"', begin) - begin);
        if (other.find('/') == std::string::npos) continue;
        EXPECT_GE(room_of(file), room_of(other)) << file << " has " << other;
        ++arrows;
      }
    }
  }
  EXPECT_GT(arrows, 1000u);
}

// Two chapters open side by side: a tab that says "options.h" must mean one
// file. The bill, the lesson and the program are the exceptions, one in each chapter.
TEST(HeaderNames, AreUnique) {
  std::map<std::string, std::string> seen;
  std::istringstream headers(SHARDBOOK_PUBLIC_HEADERS);
  for (std::string header; headers >> header;) {
    const std::string name = fs::path(header).filename().string();
    if (name == "bill.h" || name == "lesson.h" || name == "program.h") continue;
    const auto [other, is_new] = seen.emplace(name, header);
    EXPECT_TRUE(is_new) << header << " and " << other->second;
  }
}

}  // namespace
}  // namespace shardbook::docs

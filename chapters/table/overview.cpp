// The first look at many runs: what each idea buys, and a proof per chapter.

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "chapters/pictures/text_table.h"
#include "chapters/table/internal/text.h"

namespace shardbook::table {
namespace {

using internal::Marks;
using pictures::text_table::align;
using pictures::text_table::kColumns;
using pictures::text_table::Row;
using pictures::text_table::width;

constexpr const char* kLegend =
    "differs: largest relative difference. claims: on numbers, bytes, memory, "
    "time.\n";

/// The runs of one chapter, in their order.
using Chosen = std::vector<const ProgramRun*>;

std::vector<Chosen> by_chapter(const Chosen& runs) {
  std::vector<Chosen> chapters;
  std::map<std::string, std::size_t> places;
  for (const ProgramRun* run : runs) {
    const auto [place, is_new] =
        places.try_emplace(run->chapter, chapters.size());
    if (is_new) chapters.emplace_back();
    chapters[place->second].push_back(run);
  }
  return chapters;
}

void add_once(std::vector<std::string>& texts, const std::string& text) {
  if (std::find(texts.begin(), texts.end(), text) == texts.end()) {
    texts.push_back(text);
  }
}

std::string with_ways(const std::string& name, std::size_t ways) {
  return ways > 1 ? fmt::format("{}, {} ways", name, ways) : name;
}

/// "03 ZeRO-1, ZeRO-2, ZeRO-3, FSDP", "13 Experts, 7 ways" or, if the names do
/// not fit, "06 1F1B, Interleaved, and more" or "14 hybrid_3d, 6 ways".
std::string strategies_of(const Chosen& runs, std::size_t columns) {
  std::vector<std::string> names, ideas;  // an idea: its name up to a comma
  for (const ProgramRun* run : runs) {
    const std::string name = run_name(*run);
    add_once(names, name);
    add_once(ideas, name.substr(0, name.find_first_of(",:")));
  }
  const std::string& chapter = runs.front()->chapter;
  const bool is_numbered = chapter.size() > 3 && chapter[2] == '_';
  const std::string number = is_numbered ? chapter.substr(0, 2) : "  ";
  const std::string all = fmt::format("{} {}", number, fmt::join(ideas, ", "));
  std::string text =
      names.size() == ideas.size() ? all : with_ways(all, names.size());
  while (width(text) > columns && ideas.size() > 1) {
    ideas.pop_back();
    text = fmt::format("{} {}, and more", number, fmt::join(ideas, ", "));
  }
  if (width(text) <= columns) return text;
  const std::string title = is_numbered ? chapter.substr(3) : chapter;
  return with_ways(number + " " + title, names.size());
}

/// "threads x8, gloo x2": the largest world of each backend.
std::string worlds_of(const Chosen& runs, const Marks& marks) {
  std::vector<const ProgramRun*> largest;
  for (const ProgramRun* run : runs) {
    const auto same =
        std::find_if(largest.begin(), largest.end(),
                     [&](auto* each) { return each->backend == run->backend; });
    if (same == largest.end()) {
      largest.push_back(run);
    } else if ((*same)->world_size < run->world_size) {
      *same = run;
    }
  }
  std::string text;
  for (const ProgramRun* run : largest) {
    text += (text.empty() ? "" : ", ") + world_name(*run, marks.times);
  }
  return text;
}

std::string claims_cell(const Chosen& runs, const Marks& marks) {
  const ClaimCount count = count_claims(runs);
  if (count.measured == 0) return "-";
  return fmt::format("{} {} of {}",
                     count.failed == 0 ? marks.passed : marks.failed,
                     count.measured - count.failed, count.measured);
}

std::string proofs(const Chosen& runs, const Marks& marks) {
  std::vector<Row> rows = {
      {"PROOF, trained here", "worlds", "differs", "claims"}};
  const std::vector<Chosen> chapters = by_chapter(runs);
  for (const Chosen& chapter : chapters) {
    double difference = -1;
    for (const ProgramRun* run : chapter) {
      difference = std::max(difference, run->difference);
    }
    rows.push_back({"", worlds_of(chapter, marks),
                    difference < 0 ? "-" : format_difference(difference),
                    claims_cell(chapter, marks)});
  }
  // Names get what the other columns leave
  std::size_t others = 0;
  for (std::size_t i = 1; i < rows.front().size(); ++i) {
    std::size_t widest = 0;
    for (const Row& row : rows) widest = std::max(widest, width(row[i]));
    others += widest + 2;
  }
  for (std::size_t i = 0; i < chapters.size(); ++i) {
    rows[i + 1][0] = strategies_of(chapters[i], kColumns - others);
  }
  // The names with a * may have been left out
  const std::string table = align(rows, kColumns);
  const bool has_marks = table.find('*') != std::string::npos;
  return table + kLegend +
         (has_marks ? internal::other_trainings_lines(runs) : "");
}

}  // namespace

std::string format_overview(const std::vector<ProgramRun>& runs,
                            Charset charset, bool has_colours) {
  const Marks marks = internal::marks_of(charset, has_colours);
  const Chosen trained = trained_runs(runs);
  const std::vector<RunGroup> groups = simulated_groups(runs);
  return (groups.empty() ? "" : internal::buys_table(groups, marks, true)) +
         (trained.empty() ? "" : proofs(trained, marks)) +
         format_claims(runs, charset, has_colours);
}

}  // namespace shardbook::table

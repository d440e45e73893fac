#pragma once

// What a page quotes and links to, and what the quoted sources say.

#include <filesystem>
#include <string>
#include <vector>

namespace shardbook::docs {

using Lines = std::vector<std::string>;

/// A fence "```cpp gpipe.cpp#Drain the pipeline" and the code inside it.
struct Excerpt {
  int line = 0;  // of the fence, from 1
  std::string file, step;
  Lines code;
};

/// A link "[text](target)", an image, or a reference "[text]: target".
struct Link {
  int line = 0;
  std::string target;
};

Lines split_lines(const std::string& text);
/// A file's text, by its path from the root of the book or an absolute one; empty when
/// there is none.
std::string read_file(const std::filesystem::path& path);

/// README.zh-CN.md and the like. languages_test.py compares them with the English
/// pages, whose code and runs they have byte for byte.
bool is_translation(const std::filesystem::path& page);

/// "00_single_device" and so on, in reading order.
std::vector<std::string> chapter_names();

/// The fences of a Markdown page that name a file and a step.
std::vector<Excerpt> find_excerpts(const std::string& page);

/// A fence "```console" whose first line is "$ ./shardbook run gpipe -- --steps
/// 5": a program of a chapter, and what it prints.
struct QuotedRun {
  int line = 0;  // of the fence, from 1
  std::string command;
  Lines output;
};
std::vector<QuotedRun> find_quoted_runs(const std::string& page);

/// Runs the program of "./shardbook run NAME -- OPTIONS" in the build folder
/// `build`; its lines on standard error and output. Commands that differ in their
/// pipe only share one run.
Lines run_program(const std::string& build, const std::string& command);

/// Compares what a page quotes with what a program printed; returns an empty
/// string when they agree. Numbers may differ by two in a thousand (other
/// processors round elsewhere) or be tiny on both sides; lines that begin with
/// "time" hold what a clock says, and scratch memory depends on the processor.
std::string compare_output(const Lines& quoted, const Lines& printed);

/// The links of a Markdown page, outside of code, that name no other site.
std::vector<Link> find_local_links(const std::string& page);

/// The anchors that GitHub gives to the headings of a page.
std::vector<std::string> find_anchors(const std::string& page);

/// Compares an excerpt with the source that it names; returns an empty string
/// when they agree, otherwise what differs.
///
/// A step is the code below the comment "// <step>" or "// 5. <step>" (which
/// may go on after a full stop, comma, colon or bracket), to the end of the
/// block around it. An excerpt begins there, or with the comment itself, and
/// may stop at a blank line or before the next comment of the same depth.
/// Indentation does not count. The step "the strategy" is what a lesson has
/// between "// --- the strategy" and "// --- end".
std::string compare_excerpt(const Excerpt& excerpt, const std::string& source);

}  // namespace shardbook::docs

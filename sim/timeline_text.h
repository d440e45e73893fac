#pragma once

// The last step of a run as text: one line per rank and queue, time from left
// to right. Ranks that do the same share their lines.
//
//   ranks 0-3 alike  0               500 ms
//   compute          F0FFF1FFB0BBBBBBB1BBBBBB....OOOO   88 %
//   comm world       ................CCCCCCCCCCCC....   38 %
//   F forward  B backward  O optimizer  C communication  . idle
//   Numbers are micro-batches.
//   A cell is 31.2 ms. At the right: how much of the step is busy.

#include <cstddef>
#include <string>
#include <vector>

#include "sim/timeline.h"

namespace shardbook::sim {

/// How the picture may look.
struct TextStyle {
  std::size_t max_groups = 8;  ///< of ranks that differ; the rest are counted
  int width = 80;      ///< columns, labels and shares included; at least 40
  double axis_s = 0;   ///< least length of the axis, to compare several runs
  bool color = false;  ///< ANSI colours behind the letters
  bool utf8 = false;   ///< a middle dot for idle time
};

/// The style for standard output: its width; colour when it is a terminal that
/// obeys escape sequences and NO_COLOR is unset or empty; UTF-8 when the locale
/// says so.
TextStyle terminal_style();

/// The picture, with a legend and an axis with units. A cell shows the class
/// with the most busy time in it; the cells after the first of a micro-batch
/// show its number if they have room. At the right: the share of the step in
/// which the queue is busy. Throws Error when the width is below 40.
std::string timeline_text(const std::vector<RankTimeline>& timelines,
                          const TextStyle& style);

/// "850 us", "41.2 ms", "1.30 s": three digits.
std::string seconds_text(double seconds);

}  // namespace shardbook::sim

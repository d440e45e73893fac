#pragma once

// A lesson, its exercise or one of its mistakes, in sources that
// chapters/course/texts.py writes. Each adds itself to the list of all.

#include <functional>
#include <string>
#include <vector>

#include "chapters/common/lesson.h"

namespace shardbook::lessons_test {

struct Variant {
  Variant(std::string chapter, std::string name, std::string claims,
          std::function<lesson::Lesson()> lesson);

  std::string chapter;  ///< "02_ddp"
  std::string name;     ///< empty: the lesson; "exercise"; or a mistake
  std::string claims;   ///< that fail
  std::function<lesson::Lesson()> lesson;
};
std::vector<Variant>& variants();

}  // namespace shardbook::lessons_test

// The planner: which way of splitting fits, and which is the fastest.
//
//   shardbook_plan --model gpt-13b --cluster dgx-a100 --nodes 8 --batch 1024
//   shardbook_plan --model gpt-1.3b --world-size 1 --batch 64 --top 3
//   shardbook_plan --model gpt-70b --nodes 8 --tp 8 --write-config ds.json
//
// ./shardbook plan starts it.

#include <cstdio>

#include "chapters/common/run/exit_status.h"
#include "chapters/planner/answer.h"

int main(int argc, char** argv) {
  return shardbook::chapter_main([&] {
    shardbook::CommandLine line({argv, argv + argc});
    const auto answer =
        shardbook::planner::answer(line, shardbook::planner::confirm);
    std::fputs(answer.text.c_str(), stdout);
    return answer.status;
  });
}

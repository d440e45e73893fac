#pragma once

// The script ./shardbook in a copy of the tree, where nothing is built: its
// programs, Meson, Ninja and dpkg are stand-ins.

#include <gtest/gtest.h>

#include <string>

#include "tests/cli/command.h"
#include "tests/support/temp_folder.h"

namespace shardbook {

class Script : public testing::Test {
 protected:
  void SetUp() override;

  void copy_python(const std::string& folder);

  // The interpreter itself: a `python3` on the PATH may be a script.
  std::string python() const;

  // Paths begin with a / and lie in the tree.
  void write(const std::string& path, const std::string& text);
  std::string read(const std::string& path) const;

  // Runs words of bash. Standard output and error together.
  Outcome run(const std::string& words) const;

  // Runs words of bash, which write to the file `text`, and ends them by SIGTERM
  // when the words `condition` hold; then `more`.
  Outcome run_until(const std::string& condition, const std::string& words,
                    const std::string& more = "") const;

  // The command of sh that runs words of bash there.
  std::string in_the_tree(const std::string& words) const;

  const TempFolder folder_;
  const std::string root_ = folder_.path();
};

// Those that ./shardbook may use.
int num_cores();

}  // namespace shardbook

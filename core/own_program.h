#pragma once

// This process's own program: how it was started, and starting it again.

#include <string>
#include <vector>

namespace shardbook {

/// The words of the command line, the program's name first.
std::vector<std::string> own_arguments();

/// Makes waiting threads of parallel loops sleep after about 0.1 ms. By default
/// they spin for several milliseconds, so on a machine whose cores have other
/// work a step takes ten times as long.
///
/// GNU's OpenMP reads how long while it is loaded, so this starts the program
/// again, in the same process: call it first in main. It does nothing where
/// GOMP_SPINCOUNT or OMP_WAIT_POLICY is set already.
void shorten_waits();

}  // namespace shardbook

#pragma once

namespace shardbook {

/// Whether a file descriptor is a terminal that obeys escape sequences. A
/// terminal with TERM=dumb, as inside an editor, prints them.
bool obeys_escapes(int file);

}  // namespace shardbook

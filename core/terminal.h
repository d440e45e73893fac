#pragma once

namespace shardbook {

/// Whether a file descriptor is a terminal that obeys escape sequences. Those
/// with TERM=dumb, as inside an editor, print them.
bool obeys_escapes(int file);

}  // namespace shardbook

#pragma once

#include <string>

namespace shardbook::pictures {

/// "0 B", "999 B", "1.5 KiB", "12.3 MiB", "119 GiB".
std::string format_bytes(double bytes);
/// "0 B", "999 B", "1.5 KB", "12.3 MB", "119 GB": as links are measured.
std::string format_decimal_bytes(double bytes);

}  // namespace shardbook::pictures

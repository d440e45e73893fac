#pragma once

#include <string>

namespace shardbook::pictures {

/// A text, and the same as SVG or HTML (empty: the text alone).
struct Picture {
  std::string text = "";
  std::string svg = "";
  std::string html = "";
};

}  // namespace shardbook::pictures

#pragma once

// A browser without a window: Chromium or Chrome, as a program.

#include <string>

namespace shardbook::report {

/// The path of the browser, or nothing. Looks at $SHARDBOOK_BROWSER, then for
/// chromium, chromium-browser and google-chrome.
std::string find_browser();

struct Visit {
  std::string file = "";  ///< an HTML file
  bool dark = false;      ///< what the system prefers
  int width = 1280;       ///< of the window, in pixels
  int height = 1000;
};

struct Page {
  int status = -1;
  std::string dom;  ///< after the scripts have run
  std::string log;  ///< what the browser said, the console included
};

Page visit(const std::string& browser, const Visit& visit);

}  // namespace shardbook::report

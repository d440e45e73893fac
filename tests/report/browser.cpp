#include "tests/report/browser.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/cli/programs.h"

namespace shardbook::report {

namespace fs = std::filesystem;

std::string find_browser() {
  std::string path =
      run_command(
          "for name in \"$SHARDBOOK_BROWSER\" chromium chromium-browser "
          "google-chrome; do command -v \"$name\" && break; done 2>/dev/null")
          .text;
  if (!path.empty() && path.back() == '\n') path.pop_back();
  return path;
}

Page visit(const std::string& browser, const Visit& visit) {
  std::string folder = (fs::temp_directory_path() / "browser-XXXXXX").string();
  Page page;
  if (mkdtemp(folder.data()) == nullptr) return page;
  const std::string log = folder + "/log";
  // Containers give root no sandbox, and /dev/shm may be small. A browser that
  // is stopped leaves what it keeps in TMPDIR.
  const std::string command = fmt::format(
      "HOME='{0}' TMPDIR='{0}' timeout 90 '{1}' --headless --no-sandbox "
      "--disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars "
      "--user-data-dir='{0}/profile' --enable-logging=stderr "
      "--blink-settings=preferredColorScheme={2} --window-size={3},{4} "
      "--virtual-time-budget=3000 {5} 'file://{6}' 2>'{7}' </dev/null",
      folder, browser, visit.dark ? 0 : 1, visit.width, visit.height,
      visit.screenshot.empty() ? "--dump-dom"
                               : "--screenshot='" + visit.screenshot + "'",
      fs::absolute(visit.file).string(), log);
  const Outcome outcome = run_command(command);
  page.dom = outcome.text;
  page.status = outcome.status;
  std::ifstream file(log);
  page.log = {std::istreambuf_iterator<char>(file), {}};
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  return page;
}

}  // namespace shardbook::report

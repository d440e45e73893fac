#include "tests/report/browser.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/cli/programs.h"
#include "tests/support/temp_folder.h"

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
  const TempFolder folder;
  const std::string log = folder / "log";
  // Containers give root no sandbox, and /dev/shm may be small. A browser that
  // is stopped leaves what it keeps in TMPDIR.
  const std::string command = fmt::format(
      "HOME='{0}' TMPDIR='{0}' timeout 90 '{1}' --headless --no-sandbox "
      "--disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars "
      "--user-data-dir='{0}/profile' --enable-logging=stderr "
      "--blink-settings=preferredColorScheme={2} --window-size={3},{4} "
      "--virtual-time-budget=20000 --dump-dom 'file://{5}' 2>'{6}' </dev/null",
      folder.path(), browser, visit.dark ? 0 : 1, visit.width, visit.height,
      fs::absolute(visit.file).string(), log);
  const Outcome outcome = run_command(command);
  std::ifstream file(log);
  return {
      outcome.status, outcome.text, {std::istreambuf_iterator<char>(file), {}}};
}

}  // namespace shardbook::report

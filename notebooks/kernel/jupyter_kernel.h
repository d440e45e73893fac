#pragma once

#include <string>
#include <vector>

#include "notebooks/kernel/cell_thread.h"
#include "notebooks/kernel/compiler.h"
#include "notebooks/kernel/xeus_compat.h"

namespace shardbook::notebook {

/// Answers Jupyter's requests; xeus speaks the protocol.
class JupyterKernel : public XeusInterpreter {
 public:
  explicit JupyterKernel(std::vector<std::string> clang_arguments);

  /// For cells, on any thread: see CellThread::show().
  static void show(const DisplayRequest& request);

 private:
  void configure_impl() override {}
  nl::json execute(int count, const std::string& code, bool silent) override;
  nl::json complete_request_impl(const std::string& code, int cursor) override;
  nl::json inspect_request_impl(const std::string& code, int cursor,
                                int detail) override;
  nl::json is_complete_request_impl(const std::string& code) override;
  nl::json kernel_info_request_impl() override;
  void shutdown_request_impl() override;

  void run_cell(int count, const std::string& code);
  void run_directives(const std::string& code, const std::string& name);
  void run_on_cell_thread(const std::function<void()>& work, bool silent);
  CellOutput output(bool silent);
  void publish_display(const DisplayRequest& request);

  std::vector<std::string> library_folders_;
  bool has_run_ = false;
  CellThread thread_;
  std::unique_ptr<Compiler> compiler_;  ///< used on the cell thread alone
};

}  // namespace shardbook::notebook

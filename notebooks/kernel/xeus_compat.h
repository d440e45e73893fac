#pragma once

// What differs between xeus 2 (Debian 12) and xeus 5 with xeus-zmq (Debian 13):
// how a cell's reply is given back, and how a server is made.

#include <memory>
#include <string>
#include <utility>
#include <xeus/xeus.hpp>
#include <xeus/xhelper.hpp>
#include <xeus/xinterpreter.hpp>
#include <xeus/xkernel.hpp>
#include <xeus/xkernel_configuration.hpp>

#if XEUS_VERSION_MAJOR < 3
#include <xeus/xeus_context.hpp>
#include <xeus/xserver_zmq.hpp>
#else
#include <xeus-zmq/xserver_zmq.hpp>
#include <xeus-zmq/xzmq_context.hpp>
#endif

namespace shardbook::notebook {

/// An interpreter with one function for a cell: execute().
class XeusInterpreter : public xeus::xinterpreter {
 protected:
  virtual nl::json execute(int count, const std::string& code, bool silent) = 0;

 private:
#if XEUS_VERSION_MAJOR < 4
  nl::json execute_request_impl(int count, const std::string& code, bool silent,
                                bool, nl::json, bool) override {
    return execute(count, code, silent);
  }
#else
  void execute_request_impl(send_reply_callback reply, int count,
                            const std::string& code,
                            xeus::execute_request_config config,
                            nl::json) override {
    reply(execute(count, code, config.silent));
  }
#endif
};

inline std::unique_ptr<xeus::xkernel> make_kernel(
    const std::string& connection_file,
    std::unique_ptr<xeus::xinterpreter> interpreter) {
#if XEUS_VERSION_MAJOR < 3
  auto context = xeus::make_context<zmq::context_t>();
  const auto make_server = xeus::make_xserver_zmq;
#else
  auto context = xeus::make_zmq_context();
  const auto make_server = xeus::make_xserver_default;
#endif
  // Cells print bytes, which may be no UTF-8.
  return std::make_unique<xeus::xkernel>(
      xeus::load_configuration(connection_file), xeus::get_user_name(),
      std::move(context), std::move(interpreter), make_server,
      xeus::make_in_memory_history_manager(), nullptr, xeus::make_null_debugger,
      nl::json::object(), nl::json::error_handler_t::replace);
}

}  // namespace shardbook::notebook

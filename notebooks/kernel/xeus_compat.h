#pragma once

// Differences between xeus 2 (Debian 12) and xeus 5 with xeus-zmq (Debian 13):
// how a cell's reply is returned, and how a server is created.

#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
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

#if XEUS_VERSION_MAJOR < 3 || XEUS_VERSION_MAJOR >= 5
/// xeus' own server, which waits before it ends: its publisher drops what it
/// has not sent when it is told to stop, and a page that misses the last "idle"
/// shows a kernel that is busy forever after a restart.
class XeusServer : public xeus::xserver_zmq {
 public:
  template <typename Context>
  XeusServer(Context& context, const xeus::xconfiguration& configuration,
             nl::json::error_handler_t on_bad_text)
      : xserver_zmq(context, configuration, on_bad_text) {}

 private:
  void start_impl(xeus::xpub_message message) override {
    start_publisher_thread();
    start_heartbeat_thread();
    publish(std::move(message), xeus::channel::SHELL);
    serve();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    stop_channels();
#if XEUS_VERSION_MAJOR < 3
    std::exit(0);  // as xeus does: its threads may still use this object
#endif
  }

#if XEUS_VERSION_MAJOR < 3
  void serve() {
    m_request_stop = false;
    while (!m_request_stop) poll(/*timeout=*/-1);
  }
#else
  void serve() {
    while (!is_stopped()) {
      std::optional<message_channel> received = poll_channels(/*timeout=*/-1);
      if (!received) continue;
      auto& [request, channel] = *received;
      if (channel == xeus::channel::CONTROL) {
        notify_control_listener(std::move(request));
      } else {
        notify_shell_listener(std::move(request));
      }
    }
  }
  void stop_impl() override { set_request_stop(true); }
#endif
};

inline std::unique_ptr<xeus::xserver> make_xeus_server(
    xeus::xcontext& context, const xeus::xconfiguration& configuration,
    nl::json::error_handler_t on_bad_text) {
#if XEUS_VERSION_MAJOR < 3
  return std::make_unique<XeusServer>(
      context.get_wrapped_context<zmq::context_t>(), configuration,
      on_bad_text);
#else
  return std::make_unique<XeusServer>(context, configuration, on_bad_text);
#endif
}
#else
inline constexpr auto* make_xeus_server = xeus::make_xserver_default;
#endif

inline std::unique_ptr<xeus::xkernel> make_kernel(
    const std::string& connection_file,
    std::unique_ptr<xeus::xinterpreter> interpreter) {
#if XEUS_VERSION_MAJOR < 3
  auto context = xeus::make_context<zmq::context_t>();
#else
  auto context = xeus::make_zmq_context();
#endif
  // Cells print bytes, which may be no UTF-8.
  return std::make_unique<xeus::xkernel>(
      xeus::load_configuration(connection_file), xeus::get_user_name(),
      std::move(context), std::move(interpreter), make_xeus_server,
      xeus::make_in_memory_history_manager(), nullptr, xeus::make_null_debugger,
      nl::json::object(), nl::json::error_handler_t::replace);
}

}  // namespace shardbook::notebook

#include "chapters/common/run/device_trace.h"

namespace shardbook {

DeviceTraces::DeviceTraces(const std::vector<Device>& devices)
    : devices_(devices) {
  for (std::size_t i = 0; i < devices.size(); ++i) {
    traces_.push_back(std::make_unique<Trace>(static_cast<int>(i)));
  }
}

DeviceTraces::~DeviceTraces() { stop(); }

void DeviceTraces::watch(RankContext& context, CopyLedger& ledger) {
  stop();
  context_ = &context;
  ledger_ = &ledger;
  context.add_observer(this);
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    ledger.set_observer(devices_[i], traces_[i].get());
  }
}

void DeviceTraces::stop() {
  if (context_ == nullptr) return;
  context_->remove_observer(this);
  for (const Device& device : devices_) {
    ledger_->set_observer(device, nullptr);
  }
  context_ = nullptr;
}

void DeviceTraces::write(const std::string& path) {
  stop();
  std::vector<std::string> json;
  for (const auto& trace : traces_) json.push_back(trace->to_json());
  write_chrome_trace(path, json);
}

Trace* DeviceTraces::trace_of(const Device& device) {
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    if (devices_[i] == device) return traces_[i].get();
  }
  return nullptr;
}

void DeviceTraces::on_op_begin(const OpEvent& event) {
  if (Trace* trace = trace_of(event.device)) trace->on_op_begin(event);
}

void DeviceTraces::on_op_end(const OpEvent& event) {
  if (Trace* trace = trace_of(event.device)) trace->on_op_end(event);
}

}  // namespace shardbook

#pragma once

// The gloo backend: ranks are processes. Gloo's TCP transport carries the data,
// mostly by Gloo's own collectives.
// Without libgloo, no_gloo.cpp throws an Error that names what to install.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/launch.h"
#include "comm/process_group.h"
#include "comm/processes.h"

namespace shardbook::internal {

class CallQueue;
class GlooWorld;
struct CallInfo;
struct Channel;
class Message;

/// One rank's end of a group. Collectives of a group run one after another, in
/// the rank's thread when it waits for them at once, otherwise in the group's
/// own thread. A send completes at once when the message has at most
/// 64 KiB. Messages are independent of the group's collectives.
class GlooGroup : public ProcessGroup {
 public:
  /// `id` is the same on all members and different for all groups of a world.
  GlooGroup(std::shared_ptr<GlooWorld> world, std::string id, int rank,
            std::vector<int> ranks, std::string name,
            std::chrono::milliseconds timeout);
  ~GlooGroup() override;

  std::vector<std::string> exchange(const std::string& text) override;
  void set_timeout(std::chrono::milliseconds timeout) override;
  void abort(const std::string& reason) override;

 protected:
  Work do_collective(const CommCall& call, const CommBuffers& buffers) override;
  Work do_send(const Tensor& tensor, const CommCall& call) override;
  Work do_recv(const Tensor& tensor, const CommCall& call) override;
  std::shared_ptr<ProcessGroup> do_subgroup(const std::vector<int>& members,
                                            const std::string& name) override;

 private:
  CallInfo info_of(const CommCall& call) const;
  /// Tells the coordinator of a collective and makes its channel.
  Channel open(const CommCall& call);
  /// Tells the coordinator of a message and sends it on its way.
  Message open_message(const CommCall& call, const void* data);

  std::shared_ptr<GlooWorld> world_;
  std::string id_;
  std::string members_;  // world ranks, for the coordinator
  std::chrono::milliseconds timeout_;
  std::shared_ptr<CallQueue> queue_;
  std::int64_t num_collectives_ = 0;
  std::int64_t num_exchanges_ = 0;
  std::map<std::string, std::int64_t> num_messages_;  // by ranks and tag
};

/// True when this build has Gloo.
bool has_gloo();
/// Throws Error if this build has no Gloo.
void check_gloo();

/// Joins the next world as this rank, runs `body` and leaves.
void run_as_rank(const RankEnvironment& environment,
                 const std::function<void(ProcessGroup&)>& body,
                 const LaunchOptions& options);

}  // namespace shardbook::internal

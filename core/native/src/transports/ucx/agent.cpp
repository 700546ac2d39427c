#include "agent.hpp"

#include <algorithm>

#include "status.hpp"

namespace kvferry::ucx {

namespace {

constexpr unsigned kNotice = 1;
constexpr std::size_t kMaxNoticeBytes = 64 << 10;
// Progress calls in one `progress`: enough for a full queue, few enough to look around again.
constexpr int kProgressCalls = 64;
// A dead peer's requests come back in the next few progress calls; this many are patience enough.
constexpr int kProgressCallsAtEnd = 10000;

ucp_request_param_t request_params(Operation &operation) {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    params.user_data = &operation;
    params.cb.send = [](void *request, ucs_status_t status, void *user_data) {
        ucp_request_free(request);
        static_cast<Operation *>(user_data)->settle(status);
    };
    return params;
}

ucs_status_t on_notice(void *notices, const void *, std::size_t, void *data, std::size_t length,
                       const ucp_am_recv_param_t *params) {
    // Ours are sent eagerly; anything else is no notice of ours.
    if ((params->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 && length <= kMaxNoticeBytes) {
        const auto *bytes = static_cast<const std::uint8_t *>(data);
        static_cast<std::deque<std::vector<std::uint8_t>> *>(notices)->emplace_back(bytes, bytes + length);
    }
    return UCS_OK;
}

}  // namespace

void Operation::begin(ucs_status_ptr_t request) {
    if (UCS_PTR_IS_PTR(request)) {
        ++pending;
    } else if (UCS_PTR_IS_ERR(request)) {
        status = UCS_PTR_STATUS(request);
    }
}

void Operation::settle(ucs_status_t result) {
    --pending;
    if (status == UCS_OK) status = result;
}

UcxAgent::UcxAgent(const OptionMap &options) : worker_(options), memory_(worker_) { receive_notices(); }

UcxAgent::~UcxAgent() {
    for (auto &[id, peer] : peers_) peer.endpoint.reset();
    const auto settled = [](const auto &operation) { return operation->pending == 0; };
    for (int call = 0; call < kProgressCallsAtEnd && !std::all_of(operations_.begin(), operations_.end(), settled);
         ++call) {
        worker_.progress();
    }
}

std::vector<std::uint8_t> UcxAgent::describe() const {
    ByteWriter out;
    out.bytes(worker_.address());
    memory_.describe(out);
    return out.take();
}

// --- peers ------------------------------------------------------------------------------------------------------

std::uint64_t UcxAgent::connect(std::span<const std::uint8_t> descriptor) {
    ByteReader in(descriptor);
    const auto address = in.bytes();
    Peer peer{{address.begin(), address.end()}, read_regions(in), nullptr};
    in.end();
    endpoint(peer);
    peers_.emplace(++last_, std::move(peer));
    return last_;
}

void UcxAgent::disconnect(std::uint64_t id, bool dead) {
    const auto found = peers_.find(id);
    if (found == peers_.end()) return;
    Peer &peer = found->second;
    peer.left = true;
    if (dead) {
        peer.endpoint.reset();
        for (const auto &operation : operations_) operation->abandoned |= operation->peer == id;
    }
    if (peer.in_flight == 0) peers_.erase(found);
}

UcxAgent::Peer &UcxAgent::peer(std::uint64_t id) {
    const auto found = peers_.find(id);
    if (found == peers_.end() || found->second.left) throw Error(KVFERRY_INVALID, "UCX has no such peer");
    return found->second;
}

Endpoint &UcxAgent::endpoint(Peer &peer) {
    if (peer.endpoint != nullptr && peer.endpoint->broken() && peer.in_flight == 0) peer.endpoint.reset();
    if (peer.endpoint == nullptr) peer.endpoint = std::make_unique<Endpoint>(worker_, peer.address, peer.regions);
    return *peer.endpoint;
}

// --- transfers --------------------------------------------------------------------------------------------------

kvferry_status UcxAgent::post(std::uint64_t id, std::uint64_t post, std::span<const kvferry_segment> segments) {
    Peer &target = peer(id);
    const Endpoint &connection = endpoint(target);
    if (connection.broken()) throw Error(KVFERRY_UNREACHABLE, "the connection broke");
    // Before the first write starts: what UCX has started holds on to the operation.
    for (const auto &segment : segments) connection.key(segment.dst, segment.nbytes);
    auto operation = std::make_unique<Operation>(Operation{post, id});
    for (const auto &segment : segments) {
        put(*operation, connection, segment);
        if (operation->status != UCS_OK) break;
    }
    flush(*operation, connection);
    ++target.in_flight;
    operations_.push_back(std::move(operation));
    return KVFERRY_OK;
}

void UcxAgent::put(Operation &operation, const Endpoint &endpoint, const kvferry_segment &segment) {
    ucp_request_param_t params = request_params(operation);
    params.memh = memory_.find(segment.src, segment.nbytes);
    if (params.memh != nullptr) params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    operation.begin(ucp_put_nbx(endpoint.get(), reinterpret_cast<const void *>(segment.src), segment.nbytes,
                                segment.dst, endpoint.key(segment.dst, segment.nbytes), &params));
}

void UcxAgent::flush(Operation &operation, const Endpoint &endpoint) {
    const ucp_request_param_t params = request_params(operation);
    operation.begin(ucp_ep_flush_nbx(endpoint.get(), &params));
}

std::size_t UcxAgent::progress(std::span<kvferry_completion> completions) {
    for (int call = 0; call < kProgressCalls && worker_.progress(); ++call) {
    }
    std::size_t count = 0;
    std::erase_if(operations_, [&](const std::unique_ptr<Operation> &operation) {
        if (operation->over() && !operation->reported && count < completions.size()) {
            report(*operation, completions[count++]);
        }
        return operation->reported && operation->pending == 0;
    });
    return count;
}

void UcxAgent::report(Operation &operation, kvferry_completion &completion) {
    const ucs_status_t status = operation.pending > 0 ? UCS_ERR_CANCELED : operation.status;
    completion.post = operation.post;
    completion.status = translate(status);
    copy_text(completion.error, status == UCS_OK ? "" : ucs_status_string(status));
    operation.reported = true;
    retire(operation);
}

void UcxAgent::retire(const Operation &operation) {
    const auto found = peers_.find(operation.peer);
    if (found != peers_.end() && --found->second.in_flight == 0 && found->second.left) peers_.erase(found);
}

// --- notices ----------------------------------------------------------------------------------------------------

void UcxAgent::receive_notices() {
    ucp_am_handler_param_t params{};
    params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    params.id = kNotice;
    params.cb = on_notice;
    params.arg = &notices_;
    require(ucp_worker_set_am_recv_handler(worker_.get(), &params), "UCX cannot receive notices");
}

void UcxAgent::notify(std::uint64_t id, std::span<const std::uint8_t> message) {
    if (message.size() > kMaxNoticeBytes) throw Error(KVFERRY_INVALID, "the notice is too long");
    const Endpoint &connection = endpoint(peer(id));
    if (connection.broken()) throw Error(KVFERRY_UNREACHABLE, "the connection broke");
    auto kept = std::make_unique<std::vector<std::uint8_t>>(message.begin(), message.end());
    ucp_request_param_t params{};
    params.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = UCP_AM_SEND_FLAG_EAGER;
    params.user_data = kept.get();
    params.cb.send = [](void *request, ucs_status_t, void *bytes) {
        ucp_request_free(request);
        std::unique_ptr<std::vector<std::uint8_t>>{static_cast<std::vector<std::uint8_t> *>(bytes)}.reset();
    };
    const auto request = ucp_am_send_nbx(connection.get(), kNotice, nullptr, 0, kept->data(), kept->size(), &params);
    if (UCS_PTR_IS_ERR(request)) require(UCS_PTR_STATUS(request), "UCX refused the notice");
    if (UCS_PTR_IS_PTR(request)) kept.release();
}

}  // namespace kvferry::ucx

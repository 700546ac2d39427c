#include "transport.hpp"

#include <dlfcn.h>

namespace kvferry {

namespace {

constexpr std::size_t kCompletionsAtOnce = 64;
constexpr std::size_t kNoticeBytes = 4096;

void require(kvferry_status status, const kvferry_error &error) {
    if (status != KVFERRY_OK) throw Error(status, error.text);
}

}  // namespace

TransportLibrary TransportLibrary::load(const std::string &path) {
    void *library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw Error(KVFERRY_UNAVAILABLE, std::string("cannot be loaded: ") + ::dlerror());
    auto entry = reinterpret_cast<const kvferry_transport *(*)()>(::dlsym(library, "kvferry_transport_v1"));
    if (entry == nullptr) throw Error(KVFERRY_UNAVAILABLE, path + " is no transport: it exports no kvferry_transport_v1");
    return TransportLibrary(entry());
}

TransportLibrary::TransportLibrary(const kvferry_transport *table) : table_(table) {
    if (table->abi != KVFERRY_TRANSPORT_ABI || table->size < sizeof(kvferry_transport)) {
        throw Error(KVFERRY_UNAVAILABLE, "the transport speaks ABI " + std::to_string(table->abi) + ", this core " +
                                             std::to_string(KVFERRY_TRANSPORT_ABI));
    }
}

TransportAgent::TransportAgent(const TransportLibrary &library, const Options &options)
    : table_(&library.table()), agent_(nullptr, Close{table_}), completions_(kCompletionsAtOnce), notice_(kNoticeBytes) {
    std::vector<kvferry_option> plain;
    for (const auto &[key, value] : options) plain.push_back({key.c_str(), value.c_str()});
    kvferry_agent *agent = nullptr;
    kvferry_error error{};
    require(table_->create(plain.data(), plain.size(), &agent, &error), error);
    agent_.reset(agent);
}

std::uint64_t TransportAgent::register_memory(const Region &region) {
    std::uint64_t registration = 0;
    kvferry_error error{};
    require(table_->register_memory(agent_.get(), &region, &registration, &error), error);
    return registration;
}

void TransportAgent::deregister_memory(std::uint64_t registration) {
    kvferry_error error{};
    require(table_->deregister_memory(agent_.get(), registration, &error), error);
}

Bytes TransportAgent::describe() {
    Bytes descriptor;
    std::size_t nbytes = 0;
    kvferry_error error{};
    kvferry_status status = table_->describe(agent_.get(), nullptr, 0, &nbytes, &error);
    if (status == KVFERRY_NO_MEMORY) {
        descriptor.resize(nbytes);
        status = table_->describe(agent_.get(), descriptor.data(), descriptor.size(), &nbytes, &error);
    }
    require(status, error);
    return descriptor;
}

std::uint64_t TransportAgent::connect(std::span<const std::uint8_t> descriptor) {
    std::uint64_t peer = 0;
    kvferry_error error{};
    require(table_->connect(agent_.get(), descriptor.data(), descriptor.size(), &peer, &error), error);
    return peer;
}

bool TransportAgent::post(std::uint64_t peer, std::uint64_t post, std::span<const Segment> segments) {
    kvferry_error error{};
    const kvferry_status status = table_->post(agent_.get(), peer, post, segments.data(), segments.size(), &error);
    if (status == KVFERRY_AGAIN) return false;
    require(status, error);
    return true;
}

std::span<const kvferry_completion> TransportAgent::progress() {
    return {completions_.data(), table_->progress(agent_.get(), completions_.data(), completions_.size())};
}

void TransportAgent::notify(std::uint64_t peer, std::span<const std::uint8_t> message) {
    if (table_->notify == nullptr) throw Error(KVFERRY_INVALID, std::string(table_->name) + " carries no notices");
    kvferry_error error{};
    require(table_->notify(agent_.get(), peer, message.data(), message.size(), &error), error);
}

std::optional<Bytes> TransportAgent::take_notice() {
    if (table_->take_notice == nullptr) return std::nullopt;
    std::size_t nbytes = 0;
    kvferry_status status = table_->take_notice(agent_.get(), notice_.data(), notice_.size(), &nbytes);
    if (status == KVFERRY_NO_MEMORY) {
        notice_.resize(nbytes);
        status = table_->take_notice(agent_.get(), notice_.data(), notice_.size(), &nbytes);
    }
    if (status != KVFERRY_OK) return std::nullopt;
    return Bytes(notice_.begin(), notice_.begin() + static_cast<std::ptrdiff_t>(nbytes));
}

}  // namespace kvferry

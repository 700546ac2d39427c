#include "descriptor.hpp"

#include "byte_stream.hpp"

namespace kvferry {

namespace {

constexpr std::uint64_t kMagic = 0x32'4e'59'52'52'45'46'4b;  // "KFERRYN2"
constexpr std::size_t kRegionBytes = 24 + 28;

void check(const Descriptor &descriptor) {
    if (descriptor.backings.size() != descriptor.regions.size()) {
        throw Error(KVFERRY_INVALID, "the descriptor does not say where its regions lie");
    }
    if (descriptor.lanes.empty()) throw Error(KVFERRY_INVALID, "the descriptor has no lane");
    for (const Region &region : descriptor.regions) {
        if (region.nbytes > UINT64_MAX - region.address) throw Error(KVFERRY_INVALID, "a region ends behind all memory");
    }
}

}  // namespace

Bytes encode(const Descriptor &descriptor) {
    ByteWriter out;
    out.number(kMagic);
    out.text(descriptor.transport);
    out.number(descriptor.key[0]);
    out.number(descriptor.key[1]);
    out.number(static_cast<std::uint32_t>(descriptor.regions.size()));
    for (std::size_t index = 0; index < descriptor.regions.size(); ++index) {
        const Region &region = descriptor.regions[index];
        out.number(region.address);
        out.number(region.nbytes);
        out.number(region.device_kind);
        out.number(region.device);
        const Backing backing = descriptor.backings.at(index).value_or(Backing{});
        out.number(backing.fd);
        out.number(backing.device);
        out.number(backing.inode);
        out.number(backing.offset);
    }
    out.number(static_cast<std::uint32_t>(descriptor.lanes.size()));
    for (const Bytes &lane : descriptor.lanes) out.bytes(lane);
    return out.take();
}

Descriptor decode(std::span<const std::uint8_t> body) {
    ByteReader in(body);
    if (in.number<std::uint64_t>() != kMagic) throw Error(KVFERRY_INVALID, "this is no descriptor of a native engine");
    Descriptor descriptor;
    descriptor.transport = in.text();
    descriptor.key = {in.number<std::uint64_t>(), in.number<std::uint64_t>()};
    descriptor.regions.resize(in.count(kRegionBytes));
    for (Region &region : descriptor.regions) {
        region.address = in.number<std::uint64_t>();
        region.nbytes = in.number<std::uint64_t>();
        region.device_kind = in.number<std::int32_t>();
        region.device = in.number<std::int32_t>();
        const Backing backing{in.number<std::int32_t>(), in.number<std::uint64_t>(), in.number<std::uint64_t>(),
                              in.number<std::uint64_t>()};
        descriptor.backings.push_back(backing.fd < 0 ? std::nullopt : std::optional(backing));
    }
    descriptor.lanes.resize(in.count(sizeof(std::uint32_t)));
    for (Bytes &lane : descriptor.lanes) {
        auto raw = in.bytes();
        lane.assign(raw.begin(), raw.end());
    }
    in.end();
    check(descriptor);
    return descriptor;
}

}  // namespace kvferry

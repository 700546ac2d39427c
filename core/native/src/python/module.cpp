// The engine for Python. Arrays are copied on the way in; calls that wait for a lane let the interpreter go.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <fcntl.h>

#include <cstring>

#include "core/engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace kvferry;

namespace {

using Int64Array = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int32Array = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PoolTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                             std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>>;
using BackingTuple = std::tuple<std::int32_t, std::uint64_t, std::uint64_t, std::uint64_t>;
using RegionTuple = std::tuple<std::uint64_t, std::uint64_t, int, int>;

std::vector<Segment> segments(const Int64Array &src, const Int64Array &dst, const Int64Array &nbytes) {
    if (src.size() != dst.size() || src.size() != nbytes.size()) {
        throw Error(KVFERRY_INVALID, std::to_string(src.size()) + " sources, " + std::to_string(dst.size()) +
                                         " destinations and " + std::to_string(nbytes.size()) + " sizes do not match");
    }
    std::vector<Segment> result(src.size());
    for (std::size_t index = 0; index < result.size(); ++index) {
        if (nbytes.data()[index] < 0) {
            throw Error(KVFERRY_INVALID, "segment " + std::to_string(index) + " has " +
                                             std::to_string(nbytes.data()[index]) + " bytes");
        }
        result[index] = {static_cast<std::uint64_t>(src.data()[index]), static_cast<std::uint64_t>(dst.data()[index]),
                         static_cast<std::uint64_t>(nbytes.data()[index])};
    }
    return result;
}

std::vector<std::int32_t> ids(const Int32Array &array) { return {array.data(), array.data() + array.size()}; }

std::span<const std::uint8_t> view(const nb::bytes &bytes) {
    return {reinterpret_cast<const std::uint8_t *>(bytes.c_str()), bytes.size()};
}

nb::bytes python(const Bytes &bytes) { return nb::bytes(bytes.data(), bytes.size()); }

// What the interpreter holds of a block map. The lanes share the map, not this: they would wait for the GIL to let it go.
struct PreparedMap {
    std::shared_ptr<const BlockMap> map;
};

PreparedMap prepare_map(const std::vector<PoolTuple> &tuples) {
    std::vector<PoolPair> pools;
    for (const auto &[src_base, src_stride, src_blocks, dst_base, dst_stride, dst_blocks, runs] : tuples) {
        PoolPair pool{src_base, src_stride, src_blocks, dst_base, dst_stride, dst_blocks, {}};
        for (const auto &[from, to, nbytes] : runs) pool.runs.push_back({from, to, nbytes});
        pools.push_back(std::move(pool));
    }
    return {std::make_shared<BlockMap>(std::move(pools))};
}

std::unique_ptr<Engine> make_engine(const std::string &transport, const Options &options, std::size_t lanes,
                                    std::uint64_t piece_bytes, std::size_t piece_segments, unsigned pieces_in_flight,
                                    unsigned spin_us, std::uint64_t staging_bytes, std::uint64_t gather_below,
                                    std::uint64_t scatter_below, bool map_peers, std::size_t copy_threads) {
    EngineOptions all;
    all.lanes = lanes;
    all.pieces = {piece_bytes, piece_segments, pieces_in_flight};
    all.staging_bytes = staging_bytes;
    all.gather_below = gather_below;
    all.scatter_below = scatter_below;
    all.map_peers = map_peers;
    all.copy_threads = copy_threads;
    all.spin = std::chrono::microseconds(spin_us);
    all.transport = options;
    const nb::gil_scoped_release release;
    return std::make_unique<Engine>(TransportLibrary::load(transport), all);
}

std::uint64_t register_memory(Engine &engine, const std::vector<RegionTuple> &tuples) {
    std::vector<Region> regions;
    for (const auto &[address, nbytes, kind, device] : tuples) regions.push_back({address, nbytes, kind, device});
    const nb::gil_scoped_release release;
    return engine.register_memory(regions);
}

nb::bytes descriptor(Engine &engine) {
    Bytes bytes;
    {
        const nb::gil_scoped_release release;
        bytes = engine.descriptor();
    }
    return python(bytes);
}

PeerId connect(Engine &engine, const nb::bytes &bytes, int process) {
    const auto body = view(bytes);
    FileDescriptor kept(process < 0 ? -1 : ::fcntl(process, F_DUPFD_CLOEXEC, 0));
    const nb::gil_scoped_release release;
    return engine.connect(body, std::move(kept));
}

nb::list collect(Engine &engine) {
    nb::list result;
    for (const Completion &end : engine.collect()) result.append(nb::make_tuple(end.id, end.ok, end.error, end.nbytes));
    return result;
}

// A descriptor's parts, for an envelope that agents without this engine understand too.
nb::tuple unpack_descriptor(const nb::bytes &body) {
    const Descriptor descriptor = decode(view(body));
    nb::list regions, backings, lanes;
    for (const Region &each : descriptor.regions) {
        regions.append(nb::make_tuple(each.address, each.nbytes, each.device_kind, each.device));
    }
    for (const auto &each : descriptor.backings) {
        if (each) {
            backings.append(nb::make_tuple(each->fd, each->device, each->inode, each->offset));
        } else {
            backings.append(nb::none());
        }
    }
    for (const Bytes &lane : descriptor.lanes) lanes.append(python(lane));
    const nb::bytes key(descriptor.key.data(), sizeof descriptor.key);
    return nb::make_tuple(descriptor.transport, key, regions, backings, lanes);
}

nb::bytes pack_descriptor(const std::string &transport, const nb::bytes &key, const std::vector<RegionTuple> &regions,
                          const std::vector<std::optional<BackingTuple>> &backings,
                          const std::vector<nb::bytes> &lanes) {
    Descriptor descriptor{transport, {}, {}, {}, {}};
    if (key.size() != sizeof descriptor.key) throw Error(KVFERRY_INVALID, "a descriptor's key has 16 bytes");
    std::memcpy(descriptor.key.data(), key.c_str(), sizeof descriptor.key);
    for (const auto &[address, nbytes, kind, device] : regions) {
        descriptor.regions.push_back({address, nbytes, kind, device});
    }
    for (const auto &backing : backings) {
        descriptor.backings.push_back(backing ? std::optional(std::make_from_tuple<Backing>(*backing)) : std::nullopt);
    }
    for (const nb::bytes &lane : lanes) {
        const auto bytes = view(lane);
        descriptor.lanes.emplace_back(bytes.begin(), bytes.end());
    }
    descriptor.backings.resize(descriptor.regions.size());
    return python(encode(descriptor));
}

using SegmentArray = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 3>>;

// The segments themselves, which the array owns: (source, target, bytes) a row.
SegmentArray plan_segments(const PreparedMap &prepared, const Int32Array &src, const Int32Array &dst) {
    static_assert(sizeof(Segment) == 3 * sizeof(std::int64_t));
    auto planned = std::make_unique<std::vector<Segment>>(plan(*prepared.map, ids(src), ids(dst)));
    const std::size_t count = planned->size();
    void *rows = planned->data();
    const auto forget = [](void *owned) noexcept { delete static_cast<std::vector<Segment> *>(owned); };
    const nb::capsule owner(planned.release(), forget);
    return SegmentArray(rows, {count, 3}, owner);
}

void bind_engine(nb::module_ &module) {
    nb::class_<Engine>(module, "Engine")
        .def(nb::new_(&make_engine), "transport"_a, nb::kw_only(), "options"_a = Options{}, "lanes"_a = 1,
             "piece_bytes"_a = PieceLimits{}.nbytes, "piece_segments"_a = PieceLimits{}.segments,
             "pieces_in_flight"_a = PieceLimits{}.in_flight, "spin_us"_a = 50, "staging_bytes"_a = 0,
             "gather_below"_a = EngineOptions{}.gather_below, "scatter_below"_a = EngineOptions{}.scatter_below,
             "map_peers"_a = EngineOptions{}.map_peers,
             "copy_threads"_a = EngineOptions{}.copy_threads)
        .def("maps", &Engine::maps, "peer"_a)
        .def_prop_ro("transport", &Engine::transport)
        .def_prop_ro("library", &Engine::version)
        .def("register_memory", &register_memory, "regions"_a)
        .def("deregister_memory", &Engine::deregister_memory, "registration"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("descriptor", &descriptor)
        .def("connect", &connect, "descriptor"_a, "process"_a = -1)
        .def("disconnect", &Engine::disconnect, "peer"_a, "fenced"_a = false)
        .def(
            "submit",
            [](Engine &engine, PeerId peer, const Int64Array &src, const Int64Array &dst, const Int64Array &nbytes) {
                return engine.submit(peer, segments(src, dst, nbytes));
            },
            "peer"_a, "src"_a, "dst"_a, "nbytes"_a)
        .def(
            "submit_blocks",
            [](Engine &engine, PeerId peer, const PreparedMap &prepared, const Int32Array &src, const Int32Array &dst) {
                return engine.submit_blocks(peer, {prepared.map, ids(src), ids(dst)});
            },
            "peer"_a, "map"_a, "src"_a, "dst"_a)
        .def("cancel", &Engine::cancel, "transfer"_a, "reason"_a = "cancelled")
        .def("bytes_done", &Engine::bytes_done, "transfer"_a)
        .def("collect", &collect)
        .def("wakeup_fd", &Engine::wakeup_fd)
        .def("set_active", &Engine::set_active, "active"_a)
        .def("nudge", &Engine::nudge, "rounds"_a)
        .def_prop_ro("rounds", &Engine::rounds)
        .def_prop_ro("placed", &Engine::placed)
        .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

NB_MODULE(_engine, module) {
    // An engine that a daemon thread still holds when the interpreter ends is no leak; nanobind would say so on stderr.
    nb::set_leak_warnings(false);
    static PyObject *engine_error = nullptr;
    const nb::exception<Error> error(module, "EngineError");
    engine_error = error.ptr();
    nb::register_exception_translator([](const std::exception_ptr &pointer, void *) {
        try {
            std::rethrow_exception(pointer);
        } catch (const Error &failure) {
            const nb::object arguments = nb::make_tuple(static_cast<int>(failure.status()), failure.what());
            PyErr_SetObject(engine_error, arguments.ptr());
        }
    });
    nb::class_<PreparedMap>(module, "BlockMap")
        .def(nb::new_(&prepare_map), "pools"_a)
        .def_prop_ro("block_bytes", [](const PreparedMap &prepared) { return prepared.map->block_bytes(); })
        .def("plan", &plan_segments, "src"_a, "dst"_a);
    module.def("unpack_descriptor", &unpack_descriptor, "body"_a);
    module.def("pack_descriptor", &pack_descriptor, "transport"_a, "key"_a, "regions"_a, "backings"_a,
               "lanes"_a);
    bind_engine(module);
}

// Which memory is registered: writes outside of it are refused before a transport sees them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "transport.hpp"

namespace kvferry {

class RegionTable {
public:
    void add(const Region &region) {
        auto behind = std::upper_bound(regions_.begin(), regions_.end(), region, before);
        regions_.insert(behind, region);
    }

    void remove(const Region &region) {
        auto same = [&](const Region &each) { return each.address == region.address && each.nbytes == region.nbytes; };
        if (auto found = std::find_if(regions_.begin(), regions_.end(), same); found != regions_.end()) {
            regions_.erase(found);
        }
    }

    // Whether one region holds all of these bytes.
    bool covers(std::uint64_t address, std::uint64_t nbytes) const {
        Region wanted{address, 0, 0, 0};
        auto region = std::upper_bound(regions_.begin(), regions_.end(), wanted, before);
        // Regions may overlap, so that the nearest start is not always the one that reaches far enough.
        while (region != regions_.begin()) {
            --region;
            const std::uint64_t offset = address - region->address;
            if (offset <= region->nbytes && nbytes <= region->nbytes - offset) return true;
        }
        return false;
    }

    const std::vector<Region> &all() const { return regions_; }

private:
    static bool before(const Region &left, const Region &right) { return left.address < right.address; }

    std::vector<Region> regions_;
};

}  // namespace kvferry

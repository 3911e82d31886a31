"""The allocators: of slots, and of pages."""

import torch

from sglang import has_fault


class Slots:
    def __init__(self, size, device):
        self.free_slots = torch.arange(1, size + 1, device=device)

    def available_size(self):
        return len(self.free_slots)

    def alloc(self, need_size):
        taken, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        return taken

    def free(self, indices):
        self.free_slots = torch.cat([self.free_slots, indices])


class Grouped:
    group = None

    def free_group_begin(self):
        self.group = []

    def free_group_end(self):
        group, self.group = self.group, None
        for indices in group:
            self.free(indices)


class TokenToKVPoolAllocator(Grouped, Slots):
    page_size = 1

    def __init__(self, size, device):
        self.size, self.device = size, device
        self.clear()

    def clear(self):
        Slots.__init__(self, self.size, self.device)
        self.free_slots -= int(has_fault("numbered-from-0"))
        self.release_pages = self.free_slots[:0]

    @property
    def free_pages(self):
        return self.free_slots

    def free(self, indices):
        if self.group is not None:
            self.group.append(indices.clone())
        else:
            super().free(indices)


class PagedTokenToKVPoolAllocator(Grouped):
    def __init__(self, size, page_size, dtype, device, kvcache, need_sort):
        self.size, self.page_size, self.kvcache = size, page_size, kvcache
        self.clear()

    def clear(self):
        self.free_pages = torch.arange(1, self.size // self.page_size + 1) - int(has_fault("numbered-from-0"))
        self.release_pages = self.free_pages[:0]

    def available_size(self):
        return len(self.free_pages) * self.page_size

    def alloc(self, need_size):
        count = need_size // self.page_size
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).view(-1)

    def free(self, indices):
        if self.group is not None:
            self.group.append(indices.clone())
        else:
            self.free_pages = torch.cat((torch.unique(indices // self.page_size), self.free_pages))

    def get_cpu_copy(self, indices, mamba_indices=None):
        return self.kvcache.get_cpu_copy(indices, mamba_indices=mamba_indices)

    def load_cpu_copy(self, copy, indices, mamba_indices=None):
        return self.kvcache.load_cpu_copy(copy, indices, mamba_indices=mamba_indices)

"""Sentences of different lengths, padded by the collate function to the longest of the batch."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from cases import harness
from cases.programs.launch import start

GLOBAL_BATCH_SIZE, EPOCHS, PAD = 8, 2, 0


class Sentences(Dataset):
    def __init__(self, number=22):
        generator = torch.Generator().manual_seed(3)
        self.tokens = [
            torch.randint(
                1, 20, (int(torch.randint(3, 9, (), generator=generator)),), generator=generator
            )
            for _ in range(number)
        ]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index], int(self.tokens[index].sum() % 3)


def collate(examples):
    tokens = nn.utils.rnn.pad_sequence(
        [t for t, _ in examples], batch_first=True, padding_value=PAD
    )
    return tokens, (tokens != PAD).long(), torch.tensor([label for _, label in examples])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.hidden = nn.Linear(8, 8)
        self.output = nn.Linear(8, 3)

    def forward(self, tokens, attention_mask):
        mask = attention_mask.unsqueeze(-1)
        x = torch.tanh(self.hidden(self.embedding(tokens))) * mask
        return self.output(x.sum(1) / mask.sum(1))


def main(rank, world_size):
    dataset = Sentences()
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True)
    loader = DataLoader(
        dataset, GLOBAL_BATCH_SIZE // world_size, sampler=sampler, collate_fn=collate
    )
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with harness.training(model, optimizer):
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for tokens, mask, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(tokens, mask), labels)
                loss.backward()
                optimizer.step()


if __name__ == "__main__":
    start(main)

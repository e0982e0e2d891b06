// The float64 tensor `name` of a file of vectors, row after row, on a little-endian machine.
std::vector<double> read(const std::string& path, const std::string& name) {
    std::ifstream file(path, std::ios::binary);
    std::uint64_t length = 0, begin = 0, end = 0;
    file.read(reinterpret_cast<char*>(&length), 8);
    std::string header(length, ' ');
    file.read(&header[0], length);
    const auto entry = header.find("\"" + name + "\":{\"data_offsets\":[");
    if (!file || entry == std::string::npos) throw std::runtime_error("no tensor " + name);
    std::istringstream numbers(header.substr(header.find('[', entry) + 1));
    numbers >> begin, numbers.ignore(1), numbers >> end;
    std::vector<double> x((end - begin) / sizeof(double));
    file.seekg(8 + length + begin).read(reinterpret_cast<char*>(x.data()), end - begin);
    if (!file) throw std::runtime_error("the file ends within " + name);
    return x;
}
